"""What an export checks before it reads anything."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_tlt.cli import export
from megatron_tlt.cli.export import _export_on, problems_of
from megatron_tlt.cli.main import main
from megatron_tlt.config.checks.files import note_maker
from megatron_tlt.config.load import load_config
from megatron_tlt.trainer.run_record import write_config
from tests.helpers.mpi import ROOT


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("grpo-llama3.3-70b-32n8g", ()), ("grpo-qwen3-8b-1n8g-trtllm", ("rollout.trtllm.python=not/here",))],
)
def test_only_the_model_and_a_checkpoint_are_needed(recipe, overrides, tmp_path):
    """No engine, drafter, prompts, memory, nor the run's ranks."""
    config = load_config(ROOT / f"configs/recipes/{recipe}.yaml", [f"train.run_dir={tmp_path}", *overrides])
    assert {p.path for p in problems_of(config, tmp_path / "out")} == {"model.path", "train.run_dir"}
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    assert {p.path for p in problems_of(config, tmp_path / "out")} == {"model.path"}


def test_a_run_that_begins_anew_names_no_checkpoint(tmp_path):
    config = load_config(ROOT / "configs/quickstart.yaml", ["checkpoint.resume=never"])
    assert [p.path for p in problems_of(config, tmp_path / "out")] == ["checkpoint.resume"]


def test_no_model_that_a_run_begins_from_is_replaced(tmp_path):
    shutil.copy(ROOT / "assets/demo-policy/config.json", tmp_path)
    for key in ("model.path", "model.megatron_path", "model.tokenizer", "actor.lora.adapter_path"):
        is_adapter = "lora" in key
        note_maker(tmp_path, "export --adapter" if is_adapter else "export")
        config = load_config(ROOT / "configs/quickstart.yaml", [f"{key}={tmp_path}"])
        problems = {p.path: p.allowed for p in problems_of(config, tmp_path, overwrite=True, adapter=is_adapter)}
        assert "it holds what is read" in problems["--out"]


@pytest.mark.parametrize("name", ["demo-policy", "another"])
def test_a_model_other_than_the_run_s_is_a_warning(name, tmp_path, monkeypatch, caplog):
    shutil.copytree(ROOT / "assets/demo-policy", tmp_path / "moved" / name)
    checkpoint = tmp_path / "checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr("megatron_tlt.checkpoint.resume.find_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr("megatron_tlt.checkpoint.export.write_run", lambda *_: "policy version 1")
    run, given = (
        load_config(ROOT / "configs/quickstart.yaml", [f"train.run_dir={tmp_path}", *more])
        for more in ([], [f"model.path={tmp_path / 'moved' / name}"])
    )
    write_config(run, tmp_path, None, "x86_64")
    world = SimpleNamespace(is_main=True, broadcast_object=lambda value: value, enter=lambda *_: None)
    args = argparse.Namespace(out=tmp_path / "out", overwrite=False, adapter=False, dtype=None)
    _export_on(given, world, args)
    assert [f"moved/{name}" in text for text in caplog.messages] == ([] if name == "demo-policy" else [True])


def test_adapters_are_replaced_as_the_refusal_says(tmp_path, monkeypatch, capsys):
    """Without --overwrite the directory "exists: --overwrite replaces it"."""
    written = []
    world = SimpleNamespace(is_main=True, broadcast_object=lambda problems: problems, enter=lambda phase: None)
    monkeypatch.setattr(export, "run_on_every_rank", lambda section, threads, start: start(world) or 0)
    monkeypatch.setattr("megatron_tlt.checkpoint.export.write_adapter", lambda *given: written.append(given))
    monkeypatch.setattr("megatron_tlt.checkpoint.resume.find_checkpoint", lambda *_: tmp_path)
    (tmp_path / "run/checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "adapter").mkdir()
    note_maker(tmp_path / "adapter", "export --adapter")
    command = ["export", str(ROOT / "configs/quickstart.yaml"), "--out", str(tmp_path / "adapter"), "--adapter"]
    command += [f"train.run_dir={tmp_path / 'run'}", "actor.lora.rank=8"]
    assert main(command) == 2 and "exists: --overwrite replaces it" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert [given[-1] for given in written] == [True]


WRITES = """
import os, shutil, signal, sys, time
from pathlib import Path
from megatron_tlt.checkpoint.atomic import atomic_directory
from megatron_tlt.cli import export
from megatron_tlt.cli.main import main
def write(section, threads, start):
    with atomic_directory(Path(sys.argv[1]), "export"):
        print("WRITES", flush=True)
        time.sleep(60)
def remove(directory, whole=shutil.rmtree, **how):
    os.kill(os.getpid(), signal.SIGTERM)  # Slurm sends it twice
    whole(directory, **how)
export.run_on_every_rank, shutil.rmtree = write, remove
sys.exit(main(["export", "configs/quickstart.yaml", "--out", sys.argv[1]]))
"""


def test_sigterm_leaves_nothing_unfinished(tmp_path):
    command = [sys.executable, "-c", WRITES, str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "WRITES\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "megatron-tlt: ended by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []

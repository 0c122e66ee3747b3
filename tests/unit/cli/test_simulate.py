"""`megatron-tlt simulate` from the command line."""

import json
from pathlib import Path

import pytest

from megatron_tlt.cli.main import main
from tests.helpers.sim import few_steps  # noqa: F401

SMALL = ["workload.steps=1", "workload.prompts_per_step=64", "workload.lengths.median=200", "cluster.nodes=1"]


def test_a_simulation_is_printed_and_written(tmp_path, capsys):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    quick = "rollout.speculation.selector=beg_mab"
    command = ["simulate", "configs/sim/paper-7b.yaml", *SMALL, quick]
    command += ["--compare", "off,tlt", "--sweep", "nodes=1,2"]
    assert main([*command, "--out", str(out), "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Mean steps" in said and str(out) in said
    document = json.loads(out.read_text())
    assert [(p["nodes"], p["mode"]) for p in document["points"]] == [(1, "off"), (1, "tlt"), (2, "off"), (2, "tlt")]
    assert page.stat().st_size > 3000


def test_settings_of_idle_that_no_mode_has_are_named(capsys):
    idle = ["idle.pre_rollout=true", "idle.train_drafter=false", "--compare", "off,suffix"]
    assert main(["simulate", "configs/sim/paper-7b.yaml", *SMALL, *idle]) == 0
    assert "none of the compared modes has idle.pre_rollout = true\n" in (said := capsys.readouterr().out)
    assert "idle.train_drafter" not in said


def test_a_run_is_simulated_with_the_shape_in_its_models_files(capsys):
    small = ["cluster.memory_gib=80", "rollout.max_tokens=64", "train.prompts_per_step=8", "--compare", "off"]
    assert main(["simulate", "configs/quickstart.yaml", *small, "data.chat_template_kwargs.a=no"]) == 0
    said = capsys.readouterr()
    assert "Mean steps" in said.out and "kwargs.a = 'no' is a text, not a switch" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["configs/sim/paper-7b.yaml", "--compare", "off,fast"], "must be some of off, suffix, frozen, tlt"),
        (["configs/sim/paper-7b.yaml", "--sweep", "gpus=3"], "must look like nodes=1,2,4"),
        (["configs/sim/paper-7b.yaml", "workload.step=3"], "did you mean workload.steps"),
        (["configs/sim/paper-7b.yaml", "workload.lengths.path=no.txt"], f"'{Path.cwd() / 'no.txt'}': cannot be read"),
        (["configs/sim/paper-7b.yaml", "rollout.tp=7"], "must divide the 64 GPUs"),
        (["configs/sim/paper-7b.yaml", "--sweep", "nodes=²"], "must look like nodes=1,2,4"),
        (["configs/quickstart.yaml", "model.path=no/model"], "model.path (no/model) is not here"),
        (
            ["configs/recipes/dapo-qwen2.5-32b-8n8g.yaml", "--sweep", "nodes=1,8"],
            "34.1 too many (optimizer 45.8, activations 16.7, engine weights 16.3, ...) (cluster.nodes = 1)",
        ),
        (["configs/sim/paper-7b.yaml", "--out", "configs"], "is a directory"),
        (["configs/sim/paper-7b.yaml", "--report", "configs"], "is a directory"),
    ],
)
def test_mistakes_are_named(arguments, said, capsys):
    assert main(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err

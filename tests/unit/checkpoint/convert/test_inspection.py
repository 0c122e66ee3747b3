"""Descriptions and comparisons of checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.actor.checkpoint_files import MANIFEST, Manifest, read_manifest
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import RopeScaling
from tests.helpers.chat_models import edit_json
from tests.helpers.converted import make_model, naive_megatron, save_foreign
from tests.helpers.mpi import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import convert_hf_to_megatron
import convert_megatron_to_hf
import inspect_checkpoint
from conversion import comparison_report
from inspection import compare_weights, open_checkpoint, weights_digest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`hf`, `other` (one number changed) and Megatron checkpoints `mg`, `bf16` of a tiny Qwen3."""
    folder = tmp_path_factory.mktemp("inspection")
    model = make_model("qwen3", folder / "hf")
    shutil.copytree(folder / "hf", folder / "other")
    tensors = load_file(folder / "other" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, folder / "other" / "model.safetensors", metadata={"format": "pt"})
    for name, dtype in (("mg", None), ("bf16", "bf16")):
        MegatronConversion.plan(folder / "hf", dtype).write(folder / name, SingleProcess())
    save_foreign(folder / "foreign", naive_megatron(model, 256), iteration=7)
    return folder


def as_step(source, target, step, **training):
    """A converted checkpoint, made to look like one that a run saved after `step`."""
    shutil.copytree(source / "release", target)
    manifest = read_manifest(target)
    training = manifest.training | training
    changed: Manifest = replace(manifest, step=step, policy_version=step, extra={}, training=training)
    (target / MANIFEST).write_text(changed.to_json())
    return target


def test_the_digest_is_the_weights_and_not_the_layout(place):
    digest = {n: weights_digest(open_checkpoint(place / n)) for n in ("hf", "other", "mg", "bf16")}
    foreign = open_checkpoint(place / "foreign", config=place / "hf")
    assert digest["hf"] == digest["mg"] == weights_digest(foreign)
    assert len(set(digest.values())) == 3


@pytest.mark.parametrize(
    ("a", "b", "counts"), [("hf", "mg", (35, 0, 0)), ("mg", "other", (34, 0, 1)), ("hf", "bf16", (0, 0, 35))]
)
def test_checkpoints_of_any_kind_are_compared(place, a, b, counts):
    one, two = open_checkpoint(place / a), open_checkpoint(place / b)
    found = compare_weights(one, two)
    assert (found.identical, found.retyped, len(found.differing)) == counts
    if b == "other":
        assert found.differing[0][0] == "model.layers.1.mlp.up_proj.weight"
        assert found.differing[0][1] == pytest.approx(0.5, abs=1e-6)
        assert "model.layers.1.mlp.up_proj.weight: largest difference 0.5" in comparison_report(two, found)


def test_constants_of_the_model_are_compared(place, tmp_path, capsys):
    shutil.copytree(place / "hf", tmp_path / "scaled")
    about = json.loads((tmp_path / "scaled/config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 5e5, **scaling, "original_max_position_embeddings": 128}
    about = {name: value for name, value in about.items() if not name.startswith("rope_")}
    (tmp_path / "scaled/config.json").write_text(json.dumps(about | {"rope_parameters": rope}))
    assert (
        convert_hf_to_megatron.main(["--hf", str(tmp_path / "scaled"), "--out", str(tmp_path / "x"), "--dry-run"]) == 0
    )
    assert "warning: original_max_position_embeddings is 128, for which Megatron-LM has no" in capsys.readouterr().out
    MegatronConversion.plan(tmp_path / "scaled", None).write(tmp_path / "mg", SingleProcess())
    scaled, plain = open_checkpoint(tmp_path / "mg"), open_checkpoint(place / "mg")
    assert scaled.config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 128)
    with pytest.raises(CheckpointError, match=r"of different models: rope_scaling is .*; rope_theta is 500000\.0, not"):
        compare_weights(scaled, plain)
    with pytest.raises(CheckpointError, match=r"is of another model: .*rope_theta is 500000"):
        HfConversion.plan(tmp_path / "mg", None, place / "hf")


def test_nan_zero_and_type_are_distinguished(place, tmp_path):
    def changed(name, change):
        target = shutil.copytree(place / "hf", tmp_path / name)
        tensors = load_file(target / "model.safetensors")
        tensors = change(tensors) or tensors
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return open_checkpoint(target)

    def put(value):
        return lambda tensors: tensors["model.norm.weight"].__setitem__(0, value)

    nan, nan2, zero, minus = (changed(str(i), put(v)) for i, v in enumerate([torch.nan, torch.nan, 0.0, -0.0]))
    assert compare_weights(nan, nan2).identical == 35
    assert compare_weights(nan, zero).differing == [("model.norm.weight", float("inf"))]
    assert compare_weights(zero, minus).differing == [("model.norm.weight", 0.0)]
    half = changed("half", lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    wide = changed("wide", lambda tensors: {n: t.bfloat16().float() for n, t in tensors.items()})
    assert compare_weights(half, wide).retyped == 35


def test_a_checkpoint_of_adapters_is_described_and_verified(place, tmp_path, capsys):
    step = as_step(place / "mg", tmp_path / "step-000010", 10, lora="rank 4, alpha 8, q_proj", base="ab12-cd34")
    assert inspect_checkpoint.main([str(step)]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("step                10", "rank 4, alpha 8, q_proj", "ab12-cd34"))
    assert inspect_checkpoint.main([str(step), "--compare", str(place / "mg")]) == 2
    assert "holds adapters and no weights" in capsys.readouterr().err
    with (step / "__0_0.distcp").open("r+b") as shard:
        first = shard.read(1)
        shard.seek(0)
        shard.write(bytes([first[0] ^ 1]))
    assert inspect_checkpoint.main([str(step)]) == 1
    assert "DAMAGED: " in (found := capsys.readouterr().err) and "__0_0.distcp was altered" in found


def test_what_is_left_out_or_not_compared_is_said(place, tmp_path, capsys):
    hf, mg, back = (str(tmp_path / name) for name in ("hf", "mg", "back"))
    shutil.copytree(place / "hf", hf)
    edit_json(tmp_path / "hf/config.json", unheard_of=3)
    foreign = ["--config", hf, str(place / "foreign")]
    padding, compared = "125 of 256 vocabulary rows left out (padding)", "norms were not compared"
    for tool, arguments, says in (
        (convert_hf_to_megatron, ["--hf", hf, "--out", mg], "takes no --norm-epsilon 1e-06 --qk-layernorm: give"),
        (convert_megatron_to_hf, ["--megatron", mg, "--out", back], "wrote"),
        (convert_megatron_to_hf, ["--out", back + "2", *foreign[:2], "--megatron", foreign[2]], padding),
        (inspect_checkpoint, [hf, "--quick"], "Hugging Face directory"),
        (inspect_checkpoint, [*foreign, "--quick"], padding),
    ):
        assert tool.main(arguments) == 0
        said = capsys.readouterr().out
        assert says in said and "config.json sets fields that are not known, and not read: unheard_of" in said
        assert (compared in said) == (padding in said), "our own manifest is compared"


def test_a_checkpoint_of_a_run_is_for_export(place, tmp_path, capsys):
    step = as_step(place / "mg", tmp_path / "step-000010", 10)
    there = ["--megatron", str(step), "--config", str(place / "hf"), "--out", str(tmp_path / "back")]
    assert convert_megatron_to_hf.main(there) == 2
    assert "is a checkpoint of a run, which `megatron-tlt export CONFIG --out DIR` writes" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1"])
def test_a_size_of_files_that_is_none_is_refused(size, tmp_path, capsys):
    given = ["--megatron", str(tmp_path), "--out", str(tmp_path / "out"), f"--max-file-gib={size}"]
    with pytest.raises(SystemExit, match="2"):
        convert_megatron_to_hf.main(given)
    assert f"argument --max-file-gib: must be above 0 and finite, not {size}" in capsys.readouterr().err


def test_the_commands_end_with_the_right_codes(place, tmp_path, capsys, monkeypatch):
    hf, out, back = str(place / "hf"), str(tmp_path / "mg"), str(tmp_path / "back")
    there = ["--hf", hf, "--out", out]
    assert convert_hf_to_megatron.main([*there, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{hf} -> {out}: qwen3, 3 layers, ") and "free in" in said
    assert list(tmp_path.iterdir()) == []
    assert convert_hf_to_megatron.main(there) == 0
    assert convert_hf_to_megatron.main(there) == 2
    assert "--out = " in capsys.readouterr().err
    assert convert_hf_to_megatron.main([*there, "--dry-run"]) == 2
    assert convert_hf_to_megatron.main([*there, "--overwrite"]) == 0
    wrong = {hf: "it holds what is read", str(tmp_path): "no directory that `convert_hf_to_megatron` made"}
    for target, words in wrong.items():
        assert convert_hf_to_megatron.main(["--hf", hf, "--out", target, "--overwrite"]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mg"]
    assert convert_megatron_to_hf.main(["--megatron", out, "--out", back, "--dry-run"]) == 0
    assert "model.safetensors  35 tensors, " in capsys.readouterr().out
    assert convert_megatron_to_hf.main(["--megatron", out, "--out", back]) == 0
    shutil.copy(f"{out}/config.json", f"{out}/release")  # beside the shards it looks like a model
    for base, target in ((out, f"{out}/release"), (back, back)):
        wrong = ["--megatron", out, "--config", base, "--out", target, "--overwrite"]
        assert convert_megatron_to_hf.main(wrong) == 2
        assert "is not replaced: " in capsys.readouterr().err
    assert convert_megatron_to_hf.main(["--megatron", hf, "--out", back + "2"]) == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert convert_megatron_to_hf.main(["--megatron", out, "--out", back + "2"]) == 1  # failed: no bad input
    monkeypatch.undo()
    capsys.readouterr()
    assert inspect_checkpoint.main([back, "--compare", hf, "--quick"]) == 0
    assert "35 identical bit for bit" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "mg"]
    config = json.loads((place / "hf" / "config.json").read_text())
    (place / "moe").mkdir()
    (place / "moe" / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3MoeForCausalLM"]}))
    assert inspect_checkpoint.main([str(place / "hf"), "--quick"]) == 0
    assert convert_hf_to_megatron.main(["--hf", str(place / "moe"), "--out", out + "2"]) == 2
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().err

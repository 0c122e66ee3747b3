"""The way of docs/own_model.md on a tiny run: Hugging Face -> Megatron -> training at TP2 x PP2 -> Hugging Face."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.models.loader import iter_weights
from tests.helpers.mpi import ROOT, run_ranks
from tests.helpers.runs import write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def tool(name, *arguments, **options):
    return run_ranks(1, [str(ROOT / "tools" / name)], *map(str, arguments), **options).stdout


def train(ranks, folder, name, *overrides, **options):
    arguments = ["-m", "megatron_tlt"], "train", str(folder / "tiny.yaml")
    layout = ["actor.tp=2", "actor.pp=2"] if ranks == 4 else []
    run = [f"train.run_dir={folder / name}", *layout, *overrides]
    return run_ranks(ranks, *arguments, *run, **options)


@pytest.mark.nightly
def test_a_trained_model_is_the_same_by_way_of_megatron(tmp_path):
    write_config(tmp_path, train={"num_steps": 1}, eval={"every": 0})
    hf, mg = tmp_path / "model", tmp_path / "mg"
    assert "identical bit for bit" in tool("roundtrip.py", "--hf", hf, "--tp", 2, "--pp", 2)
    tool("convert_hf_to_megatron.py", "--hf", hf, "--out", mg, "--tp", 2, "--pp", 2)
    train(4, tmp_path, "direct")
    train(4, tmp_path, "converted", f"model.path={mg}", f"model.megatron_path={mg}")
    weights = []
    for name in ("direct", "converted"):
        out = tmp_path / f"{name}-hf"
        checkpoints = tmp_path / name / "checkpoints"
        tool("convert_megatron_to_hf.py", "--megatron", checkpoints, "--config", hf, "--out", out)
        weights.append(dict(iter_weights(out)))
    direct, converted = weights
    start = dict(iter_weights(hf))
    assert start.keys() == direct.keys() == converted.keys()
    assert all(torch.equal(direct[name], converted[name]) for name in direct)
    assert any(not torch.equal(direct[name], start[name]) for name in direct)
    said = tool("inspect_checkpoint.py", checkpoints, "--compare", tmp_path / "direct-hf")
    assert "checkpoint of a run" in said and "tp 2 x pp 2" in said and "0 different" in said

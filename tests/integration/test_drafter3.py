"""`megatron-tlt drafter train --kind eagle3` on a tiny model, from the answers to directories that engines can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_tlt.drafter.checkpoint import read_about
from megatron_tlt.drafter.export.drafter import export_drafter
from tests.helpers import engine_drafters
from tests.helpers.runs import TINY_WARM_UP, make_model, run_drafter, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

ENGINES = {
    "sglang": engine_drafters.SglangEagle3,
    "trtllm": engine_drafters.TrtllmEagle3,
    "vllm": engine_drafters.VllmEagle3,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with `tiny.yaml` and a drafter of 60 steps in `trained`, made by two ranks."""
    folder = tmp_path_factory.mktemp("drafter3")
    config = write_config(folder, drafter=TINY_WARM_UP)
    make_model(folder / "model", num_layers=4)
    options = ["--kind", "eagle3", "--draft-vocab", 80, "--layers", "0,1,2", "--out", folder / "trained"]
    done = run_drafter(2, "train", config, *options)
    assert "drafts 80 of 288 tokens" in done.stdout
    assert "drafter step 60/60" in done.stdout
    return folder


def test_training_raises_acceptance_on_held_out_prompts(run: Path) -> None:
    arguments = ["--kind", "eagle3", "--draft-vocab", 80, "--layers", "0,1,2", "drafter.lr=1e-9"]
    run_drafter(1, "train", run / "tiny.yaml", *arguments, "--out", run / "fresh", "drafter.num_steps=1")
    before, after = (json.loads((run / n / "eval.json").read_text()) for n in ("fresh", "trained"))
    for position in range(3):
        assert after["overlap"][position] > before["overlap"][position] + 0.03
    out = run / "again.json"
    run_drafter(
        1, "eval", run / "tiny.yaml", "--drafter", run / "trained", "--out", out, "cluster.ranks_per_node=1"
    )
    assert json.loads(out.read_text())["overlap"] == pytest.approx(after["overlap"], rel=1e-6)


def test_what_was_trained_is_exported_for_every_engine(run: Path) -> None:
    about = read_about(run / "trained")
    assert (about["trained_steps"], about["eagle3_layers"], about["draft_vocab_size"]) == (60, [0, 1, 2], 80)
    for kind, engine in ENGINES.items():
        export_drafter(run / "trained", run / kind, kind, torch.float32)
        read = engine(run / kind)
        assert read.aux_layers(4) == [0, 1, 2]
        assert len(read.offsets) == 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "eagle3", "--layers", "0,1,3"], "eagle3_layers = [0, 1, 3]: must be three"),
        (["--kind", "eagle3", "rollout.tp=2"], "rollout.tp = 2"),
        (["--kind", "eagle", "--drafter", "trained"], "is of kind eagle3"),
        (["--draft-vocab", "8"], "--draft-vocab = 8: is for a fresh drafter of kind eagle3"),
    ],
)
def test_wrong_arguments_are_errors_with_a_clear_message(run: Path, arguments: list[str], says: str) -> None:
    given = [run / a if a == "trained" else a for a in arguments]
    ranks = 2 if "rollout.tp=2" in arguments else 1
    ends = [f"cluster.ranks_per_node={ranks}"]
    done = run_drafter(ranks, "train", run / "tiny.yaml", *given, "--out", run / "x", *ends, check=False)
    assert says in done.stdout
    assert done.returncode == 2
    assert not (run / "x").exists()

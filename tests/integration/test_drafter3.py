"""`megatron-tlt drafter train` with `drafter.kind: eagle3` on a tiny model, to directories that engines can read."""

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


KIND = ["drafter.kind=eagle3", "drafter.draft_vocab_size=80", "drafter.layers=[0,1,2]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with `tiny.yaml` and a drafter of 60 steps in `trained`, made by two ranks."""
    folder = tmp_path_factory.mktemp("drafter3")
    config = write_config(folder, drafter=TINY_WARM_UP)
    make_model(folder / "model", num_layers=4)
    done = run_drafter(2, "train", config, *KIND, "--out", folder / "trained")
    assert "drafts 80 of 288 tokens" in done.stdout
    assert "drafter step 60/60" in done.stdout
    return folder


def test_training_raises_acceptance_on_held_out_prompts(run: Path) -> None:
    arguments = [*KIND, "drafter.lr=1e-9", "drafter.num_steps=1"]
    run_drafter(1, "train", run / "tiny.yaml", *arguments, "--out", run / "fresh")
    before, after = (json.loads((run / n / "eval.json").read_text()) for n in ("fresh", "trained"))
    for position in range(3):
        assert after["overlap"][position] > before["overlap"][position] + 0.03
    out = run / "again.json"
    arguments = ["drafter.kind=eagle3", "--drafter", run / "trained", "--out", out, "cluster.ranks_per_node=1"]
    run_drafter(1, "eval", run / "tiny.yaml", *arguments)
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
        (["drafter.kind=eagle3", "drafter.layers=[0,1,3]"], "drafter.layers = [0, 1, 3]: must be three"),
        (["--drafter", "trained"], "is of kind eagle3, but drafter.kind = eagle"),
        (["drafter.draft_vocab_size=8"], "drafter.draft_vocab_size = 8: needs drafter.kind: eagle3"),
    ],
)
def test_wrong_arguments_are_errors_with_a_clear_message(run: Path, arguments: list[str], says: str) -> None:
    given = [run / a if a == "trained" else a for a in arguments]
    ends = ["--out", run / "x", "cluster.ranks_per_node=1"]
    done = run_drafter(1, "train", run / "tiny.yaml", *given, *ends, check=False)
    assert says in done.stdout
    assert done.returncode == 2
    assert not (run / "x").exists()

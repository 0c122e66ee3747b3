"""`megatron-tlt drafter train | eval` on a tiny model, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_tlt.drafter.checkpoint import load_drafter
from megatron_tlt.models.config import ModelConfig
from tests.helpers.runs import TINY_WARM_UP, run_drafter, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with `tiny.yaml` and in `fresh` a drafter that has learned nothing."""
    folder = tmp_path_factory.mktemp("drafter")
    config = write_config(folder, drafter=TINY_WARM_UP)
    run_drafter(1, "train", config, "--out", folder / "fresh", "drafter.num_steps=1", "drafter.lr=1e-9")
    return folder


def evaluated(run: Path, name: str, ranks: int = 1) -> dict:
    out = run / f"{name}-{ranks}.json"
    arguments = ["--drafter", run / name, "--out", out, f"cluster.ranks_per_node={ranks}"]
    assert "expected accepted length" in run_drafter(ranks, "eval", run / "tiny.yaml", *arguments).stdout
    return json.loads(out.read_text())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_training_raises_acceptance_on_held_out_prompts(run: Path, ranks: int) -> None:
    name = f"trained-{ranks}"
    done = run_drafter(
        ranks, "train", run / "tiny.yaml", "--out", run / name, f"cluster.ranks_per_node={ranks}"
    )
    assert "drafter step 30/60" in done.stdout and "drafter step 60/60" in done.stdout
    before, after = evaluated(run, "fresh"), evaluated(run, name)
    assert after["bases"] == before["bases"] > 0
    for position in range(3):
        assert after["overlap"][position] > before["overlap"][position] + 0.05
    assert after["overlap"] == pytest.approx(
        json.loads((run / name / "eval.json").read_text())["overlap"], rel=1e-6
    )
    saved = load_drafter(run / name, ModelConfig.from_hf(run / "model"))
    assert saved.trained_steps == 60


def test_measuring_does_not_depend_on_the_ranks(run: Path) -> None:
    one, two = evaluated(run, "fresh", 1), evaluated(run, "fresh", 2)
    assert two["bases"] == one["bases"]
    for name in ("overlap", "coupled", "p_argmax_q", "p_top4_q"):
        assert two[name] == pytest.approx(one[name], rel=1e-6)


def test_training_can_go_on_from_a_drafter(run: Path) -> None:
    short = ["drafter.num_steps=3", "drafter.lr=1e-9"]
    run_drafter(1, "train", run / "tiny.yaml", "--drafter", run / "fresh", "--out", run / "more", *short)
    config = ModelConfig.from_hf(run / "model")
    start, more = load_drafter(run / "fresh", config), load_drafter(run / "more", config)
    assert more.trained_steps == 1 + 3
    for name, tensor in start.weights.items():
        torch.testing.assert_close(more.weights[name], tensor, atol=1e-7, rtol=0)


def test_wrong_arguments_are_errors_with_a_clear_message(run: Path) -> None:
    done = run_drafter(1, "eval", run / "tiny.yaml", "--drafter", run / "nothing", check=False)
    assert done.returncode == 2
    assert "--drafter" in done.stdout and "cannot be read" in done.stdout
    about = json.loads((run / "fresh" / "config.json").read_text())
    about["policy_fingerprint"]["embedding"] = "0" * 16
    shutil.copytree(run / "fresh", run / "other")
    (run / "other" / "config.json").write_text(json.dumps(about))
    arguments = ["eval", run / "tiny.yaml", "--drafter", run / "other"]
    done = run_drafter(1, *arguments, check=False)
    assert done.returncode == 2
    assert "was made for a policy with another embedding than" in done.stdout
    run_drafter(1, *arguments, "rollout.speculation.allow_other_policy=true")
    done = run_drafter(
        1, "eval", run / "tiny.yaml", "--drafter", run / "fresh", "data.eval=null", check=False
    )
    assert done.returncode == 2
    assert "data.eval = None: measuring a drafter needs held-out prompts" in done.stdout

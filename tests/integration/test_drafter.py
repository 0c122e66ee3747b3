"""`megatron-tlt drafter train | eval` of both kinds of drafter on a tiny model, to directories for engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_tlt.drafters.checkpoint import load_drafter, read_about
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import TINY_WARM_UP, make_model, run_drafter, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]

SPEC = "rollout.speculation"
EAGLE3 = [f"{SPEC}.drafter=eagle3", f"{SPEC}.draft_vocab_size=80", f"{SPEC}.layers=[0,1,2]"]
KINDS = {"eagle": [], "eagle3": EAGLE3}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with `tiny.yaml`, a fresh drafter of each kind, and one of 60 steps in `trained-KIND`, by two ranks."""
    folder = tmp_path_factory.mktemp("drafter")
    config = write_config(folder, drafter=TINY_WARM_UP, rollout={"speculation": {"drafter": "eagle"}})
    make_model(folder / "model", num_layers=4)  # of which eagle3 reads three
    for kind, options in KINDS.items():
        little = [*options, "drafter.lr=1e-9", "drafter.num_steps=1", "cluster.ranks_per_node=1"]
        run_drafter(1, "train", config, *little, "--out", folder / f"fresh-{kind}")
        said = run_drafter(2, "train", config, *options, "--out", folder / f"trained-{kind}").stdout
        assert "drafter step 30/60" in said and "drafter step 60/60" in said
        assert ("drafts 80 of 288 tokens" in said) == (kind == "eagle3")
    shutil.copytree(folder / "fresh-eagle", folder / "other")
    about = json.loads((folder / "other" / "config.json").read_text())
    about["policy_fingerprint"]["embedding"] = "0" * 16
    (folder / "other" / "config.json").write_text(json.dumps(about))
    return folder


def evaluated(run: Path, name: str, ranks: int = 1) -> dict:
    kind, out = name.split("-")[1], run / f"{name}-{ranks}.json"
    if out.exists():
        return json.loads(out.read_text())
    arguments = ["--drafter", run / name, "--out", out, f"{SPEC}.drafter={kind}", f"cluster.ranks_per_node={ranks}"]
    assert "expected accepted length" in run_drafter(ranks, "eval", run / "tiny.yaml", *arguments).stdout
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_acceptance_on_held_out_prompts(run: Path, kind: str) -> None:
    before, after = evaluated(run, f"fresh-{kind}"), evaluated(run, f"trained-{kind}")
    assert after["bases"] == before["bases"] > 0
    for position in range(3):
        assert after["overlap"][position] > before["overlap"][position] + (0.05 if kind == "eagle" else 0.03)
    written = json.loads((run / f"trained-{kind}" / "eval.json").read_text())
    assert after["overlap"] == pytest.approx(written["overlap"], rel=1e-6)
    about = read_about(run / f"trained-{kind}")
    assert about["trained_steps"] == 60
    if kind == "eagle3":
        assert (about["eagle3_layers"], about["draft_vocab_size"]) == ([0, 1, 2], 80)


def test_measuring_does_not_depend_on_the_ranks(run: Path) -> None:
    one, two = evaluated(run, "fresh-eagle", 1), evaluated(run, "fresh-eagle", 2)
    assert two["bases"] == one["bases"]
    for name in ("overlap", "coupled"):
        assert two[name] == pytest.approx(one[name], rel=1e-6)


def test_training_can_go_on_from_a_drafter(run: Path) -> None:
    short = ["drafter.num_steps=3", "drafter.lr=1e-9"]
    run_drafter(1, "train", run / "tiny.yaml", "--drafter", run / "fresh-eagle", "--out", run / "more", *short)
    config = ModelConfig.from_hf(run / "model")
    start, more = load_drafter(run / "fresh-eagle", config), load_drafter(run / "more", config)
    assert more.trained_steps == 1 + 3
    for name, tensor in start.weights.items():
        torch.testing.assert_close(more.weights[name], tensor, atol=1e-7, rtol=0)


def test_a_stopped_training_goes_on_to_the_same_drafter(tmp_path) -> None:
    """A signal in a rollout and in two places of the training; and the same responses given in a file."""
    little = {"num_prompts": 6, "samples_per_prompt": 2, "eval_prompts": 2, "num_steps": 8, "eval_every": 4}
    speculation = {"drafter": "eagle", "draft_vocab_size": 80}
    config = write_config(
        tmp_path,
        drafter=TINY_WARM_UP | little,
        rollout={"speculation": speculation, "max_running_requests": 4},
        cluster={"ranks_per_node": 1},
    )
    said = run_ranks(1, "tests/integration/workers/drafter_stops.py", str(config), str(tmp_path)).stdout
    assert "goes on after step 4/8" in said and "goes on after step 7/8" in said
    written = {name: (tmp_path / name / "drafter.safetensors").read_bytes() for name in ("whole", "stopped", "given")}
    assert written["stopped"] == written["whole"] == written["given"]
    assert not [*tmp_path.glob("*/unfinished")]
    seen = [json.loads((tmp_path / name / "eval.json").read_text()) for name in ("whole", "stopped")]
    assert seen[0]["coupled"] == seen[1]["coupled"]
    assert [point["step"] for point in seen[1]["over_time"]] == [4, 8]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train --out x --drafter trained-eagle3", "has drafter = eagle3, but rollout.speculation.drafter = eagle"),
        ("eval --drafter other", "was made for a policy with another embedding than"),
        ("eval --drafter fresh-eagle data.eval=null", "data.eval = None: is required: this command"),
    ],
)
def test_wrong_arguments_are_errors_with_a_clear_message(run: Path, command: str, says: str) -> None:
    verb, *words = command.split()
    places = ("x", "other", "fresh-eagle", "trained-eagle3")
    arguments = [run / word if word in places else word for word in words]
    done = run_drafter(1, verb, run / "tiny.yaml", *arguments, "cluster.ranks_per_node=1", check=False)
    assert says in done.stdout
    assert done.returncode == 2
    assert not (run / "x").exists()

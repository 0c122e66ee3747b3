"""Whole runs that roll out with a real vLLM: TLT changes no weight, and a resumed run ends at the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from make_demo_policy import write_experts

from tests.helpers.mpi import ROOT, run_ranks
from tests.helpers.runs import assert_same_training, rollout_digests, rows
from tests.helpers.vllm_engines import NEEDS_VLLM

pytestmark = [pytest.mark.mpi, *NEEDS_VLLM]
SMALL = (
    *("train.num_steps=3", "train.prompts_per_step=8", "rollout.max_tokens=160", "rollout.max_running_requests=32"),
    *("checkpoint.every=1", "checkpoint.keep=3", "eval.every=0", "idle.min_steps_per_window=1"),
)
OFF = (
    "rollout.speculation.drafter=none",
    "rollout.speculation.drafter_path=null",
    "idle.train_drafter=false",
    "idle.pre_rollout=false",
)
FRESH = (
    "rollout.speculation.selector=fixed",  # cost_model does not draft with one that knows so little
    "rollout.speculation.draft_len=4",
    "rollout.speculation.drafter_path=null",
)
KINDS = {  # the demo drafter, and those that start from the policy
    "eagle": (),
    "eagle3": ("rollout.speculation.drafter=eagle3", *FRESH),
    "dspark": ("rollout.speculation.drafter=dspark", *FRESH),
}


def train(run_dir: Path, *overrides: str) -> None:
    config = str(ROOT / "configs/quickstart.yaml")
    given = ("rollout.backend=vllm", f"train.run_dir={run_dir}", *SMALL, *overrides)
    run_ranks(2, ["-m", "megatron_tlt", "train"], config, *given, timeout=1800)


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("off") / "run"
    train(run, *OFF)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_tlt_changes_no_weight_and_a_resumed_run_ends_at_the_same_bits(tmp_path: Path, off: Path, kind: str) -> None:
    on, resumed, options = tmp_path / "on", tmp_path / "resumed", KINDS[kind]
    train(on, *options)
    for row in rows(on):
        assert row["spec/accept_length"] > (1.5 if kind == "eagle" else 1.0), "the drafter drafts"
        assert row["drafter/version"] == row["step"]
    assert sum(row["drafter/steps"] for row in rows(on)) > 0, "idle time trained it"
    assert_same_training(off, on, 3)
    if kind == "eagle":
        pulled = tmp_path / "pulled"
        train(pulled, "rollout.max_running_requests=2", "idle.train_drafter=false")
        assert_same_training(off, pulled, 3)
    shutil.copytree(on, resumed, ignore=shutil.ignore_patterns("status"))
    shutil.rmtree(resumed / "checkpoints/step-000003")
    train(resumed, *options)
    assert_same_training(on, resumed, 3)


def test_pre_rollouts_alone_change_no_weight(tmp_path: Path, off: Path) -> None:
    on = tmp_path / "on"
    train(on, *OFF, "idle.pre_rollout=true")
    assert sum(row.get("pre_rollout/tokens", 0) for row in rows(on)) > 100
    assert max(row.get("pre_rollout/accept_length", 0) for row in rows(on)) > 2
    assert_same_training(off, on, 3)


def test_carried_responses_go_on_as_in_the_embedded_engine_and_tlt_changes_no_weight(tmp_path: Path) -> None:
    carried = ("rollout.carry_over=64", "algorithm.mask_off_policy=true")
    on, without, embedded = tmp_path / "on", tmp_path / "off", tmp_path / "embedded"
    train(on, *carried)
    train(without, *carried, *OFF)
    train(embedded, *carried, *OFF, "rollout.backend=embedded")
    assert rows(on)[-1]["carry_over/token_age_max"] >= 1 and rows(on)[-1]["spec/accept_length"] > 1.5
    assert_same_training(without, on, 3)
    assert rollout_digests(on) == rollout_digests(embedded)


def test_experts_that_vllm_chose_are_replayed_and_tlt_changes_no_weight(tmp_path: Path) -> None:
    write_experts(ROOT / "assets/demo-policy", tmp_path / "experts", seed=0)
    policy = (f"model.path={tmp_path / 'experts'}", "actor.ep=2", "actor.router_replay=rollout")
    on, without = tmp_path / "on", tmp_path / "off"
    train(on, *policy)
    train(without, *policy, *OFF)
    for row in rows(on):
        assert row["spec/accept_length"] > 1.5, "the drafter drafts"
        assert row["policy/replayed_share"] == 1
        assert row["policy/replay_flips"] < 1e-3, "in fp32 both choose alike, up to near-ties"
    assert sum(row["drafter/steps"] for row in rows(on)) > 0, "idle time trained it"
    assert_same_training(without, on, 3)


def test_ranks_of_a_tensor_parallel_engine_respond_alike_and_as_the_embedded_engine() -> None:
    """Each with a vLLM of its own, whose schedulers take the same steps, also after an interrupted rollout."""
    done = run_ranks(2, "tests/integration/workers/vllm_tensor_parallel.py", timeout=1800)
    assert done.stdout.count("interrupted") == done.stdout.count("equal on both ranks") == 2

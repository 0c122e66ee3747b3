"""Whole runs whose idle ranks pre-roll the next step, and whose evaluations draft: nothing but time depends on it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.columns import undocumented_of
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import assert_same_checkpoint, rollout_digests, rows, run_with_fault, train_many, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

STEPS, LAST = 3, "checkpoints/step-000003"
ON, OFF = ["idle.pre_rollout=true"], ["idle.pre_rollout=false"]
SPEC = "rollout.speculation"
SUFFIX = f"{SPEC}.drafter=suffix"
EAGLE = [f"{SPEC}.drafter=eagle", "idle.train_drafter=true", "idle.min_tail_seconds=0"]
EVALS = ["eval.every=1", f"{SPEC}.selector=fixed"]
TURNS = [
    *("env.max_turns=3", "env.max_turn_tokens=16", "env.max_observation_tokens=16", "env.tool_role=user"),
    *("rollout.max_tokens=60", f"{SPEC}.selector=fixed"),
]
KINDS = {
    "grpo": [],
    "dynamic": ["algorithm.name=dapo", "algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2"],
    "carried": ["rollout.carry_over=12"],
    # Three environments, with `reset`, and turns that call tools: a random policy's do not.
    "agents": ["env.path=tests.helpers.late_environments:LateEnvironments", "env.params.most_s=0", *TURNS],
}


def evaluations(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [[name for name in row if name.startswith(("step", "eval/")) and name != "eval/seconds"] for row in found]
    return [{name: row[name] for name in names} for row, names in zip(found, kept, strict=True) if len(names) > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pre-rollouts")
    train = {"num_steps": STEPS, "prompts_per_step": 8}
    config = write_config(path, train=train, checkpoint={"every": STEPS}, eval={"every": 0})
    jobs = {f"{kind}-{name}": [*more, *on] for kind, more in KINDS.items() for name, on in (("on", ON), ("off", OFF))}
    jobs |= {"grpo-suffix": [*ON, SUFFIX], "grpo-eagle": [*ON, *EAGLE, "rollout.release_cache=true"]}
    jobs |= {"evals-on": [*EVALS, "idle.pre_rollout=auto"], "evals-off": [*EVALS, *OFF]}
    jobs["agents-suffix"] = [*KINDS["agents"], SUFFIX, "idle.pre_rollout=auto"]
    train_many(config, jobs, fault="")
    return path


@pytest.mark.parametrize("run", [*(f"{kind}-on" for kind in KINDS), "grpo-suffix", "grpo-eagle", "agents-suffix"])
def test_responses_rewards_and_weights_are_the_same(folder: Path, run: str):
    off, on = folder / f"{run.partition('-')[0]}-off", folder / run
    assert_same_checkpoint(off / LAST, on / LAST)
    assert rollout_digests(off) == rollout_digests(on)
    tokens = [[row["engine/generated_tokens"] for row in rows(of)] for of in (off, on)]
    assert tokens[0] == tokens[1], "pre-rolled tokens are not the step's"


@pytest.mark.parametrize("run", ["agents-on", "agents-suffix"])
def test_first_turns_of_environments_are_pre_rolled_and_verified(folder: Path, run: str):
    first, *others = rows(folder / run)
    assert undocumented_of(others) == [], "columns that docs/reference/metrics.md does not have"
    assert first["pre_rollout/tokens"] > 0
    assert all(row["pre_rollout/accept_length"] > 1 for row in others)
    assert others[-1]["env/turns"] > 1.2, "turns behind the first one draft otherwise"


def test_evaluations_that_draft_are_the_same(folder: Path):
    assert_same_checkpoint(folder / "evals-off" / LAST, folder / "evals-on" / LAST)
    off, on = (evaluations(folder / f"evals-{name}") for name in ("off", "on"))
    assert len(on) == STEPS + 1 and off == on
    tokens = [[row["engine/generated_tokens"] for row in rows(folder / name)] for name in ("evals-off", "grpo-off")]
    assert tokens[0] == [row["engine/generated_tokens"] for row in rows(folder / "evals-on")] == tokens[1]


@pytest.mark.nightly  # whether a window is long enough is a matter of time
@pytest.mark.parametrize("run", ["grpo-on", "grpo-suffix", "grpo-eagle"])
def test_a_step_accepts_what_the_step_before_pre_rolled(folder: Path, run: str):
    first, *others = rows(folder / run)
    assert first["pre_rollout/tokens"] > 0 and "pre_rollout/drafted_share" not in first
    used = [row for row in others if "pre_rollout/drafted_share" in row]  # not before the selector tries them
    assert used and all(row["pre_rollout/drafted_share"] > 0.05 for row in used)
    assert all(row["pre_rollout/accept_length"] > 1.5 for row in used)
    assert "pre_rollout/tokens" not in others[-1], "nothing comes after the last step"
    assert all(0 < row["pre_rollout/seconds"] <= row["idle/seconds"] for row in (first, *others[:-1]))
    assert not any(name.startswith("pre_rollout/") for row in rows(folder / "grpo-off") for name in row)


@pytest.mark.nightly
def test_a_failure_in_a_window_ends_pre_rollouts_with_one_warning(folder: Path):
    said = train_many(folder / "tiny.yaml", {"grpo-failed": ON}, fault="pre-roll")
    assert_same_checkpoint(folder / "grpo-off" / LAST, folder / "grpo-failed" / LAST)
    assert said.count("pre-rolls no more") == 1
    assert not any("pre_rollout/drafted_share" in row for row in rows(folder / "grpo-failed"))


@pytest.mark.nightly
def test_a_run_killed_in_a_window_goes_on_to_the_same_weights(folder: Path):
    config, run = folder / "tiny.yaml", folder / "killed"
    options = [*ON, f"train.run_dir={run}", "checkpoint.every=1", "checkpoint.asynchronous=false"]
    options.append("idle.min_tail_seconds=0")
    few = ["rollout.max_running_requests=4", "rollout.schedule=static", SUFFIX]
    run_with_fault(config, {"pre_roll": 2}, *options, *few)
    assert not (run / "checkpoints/step-000002").exists() and (run / "checkpoints/step-000001").exists()
    run_ranks(2, ["-m", "megatron_tlt", "train"], str(config), *options, *few)
    assert_same_checkpoint(folder / "grpo-off" / LAST, run / LAST)
    assert rollout_digests(folder / "grpo-off") == rollout_digests(run)

"""Whole runs that train the drafter in idle time: the policy stays the same, and a resumed run trains on."""

import json
from pathlib import Path

import pytest
import torch
from make_demo_policy import write_experts

from megatron_tlt.drafter.state_file import DRAFTER_STATE, load_drafter_state
from megatron_tlt.observe.events import read_events
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.rollouts import ROLLOUTS_FILE
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import checkpoint_tensors, make_model, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SAME = ("reward/mean", "length/mean", "policy/loss", "policy/grad_norm", "engine/generated_tokens")
SPEC = "rollout.speculation"
TRAIN = [
    f"{SPEC}.drafter=eagle",
    f"{SPEC}.selector=fixed",
    f"{SPEC}.draft_len=3",
    "idle.train_drafter=true",
    "idle.min_tail_seconds=0",
    "drafter.online.warmup_steps=0",
]
EAGLE3 = "rollout.speculation.drafter=eagle3"


def run(folder: Path, jobs: list[tuple[str, list[str], str]], ranks: int = 2) -> str:
    """Runs named jobs into `folder`/NAME; their output."""
    config = folder / "tiny.yaml"
    listing = folder / "jobs.json"
    listing.write_text(
        json.dumps([[str(config), [f"train.run_dir={folder / name}", *o], fault] for name, o, fault in jobs])
    )
    return run_ranks(ranks, "tests/integration/workers/train_idle.py", str(listing)).stdout


def assert_same_policy(folder: Path, name: str, off: str = "off") -> None:
    checkpoint = "checkpoints/step-000004"
    plain, other = (checkpoint_tensors(folder / n / checkpoint) for n in (off, name))
    assert other.keys() == plain.keys() and any(value.abs().sum() > 0 for value in plain.values())
    unequal = [key for key in plain if not torch.equal(plain[key], other[key])]
    assert not unequal, f"{name}: {unequal[:5]}"
    for mine, theirs in zip(rows(folder / name), rows(folder / off), strict=True):
        assert {k: mine[k] for k in SAME} == {k: theirs[k] for k in SAME}, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idle")
    write_config(path, train={"num_steps": 4, "prompts_per_step": 8}, checkpoint={"every": 2})
    make_model(path / "model", num_layers=4)  # of which eagle3 reads three
    faults = ("", "crash", "nan")
    jobs = [("off", [], ""), *((f"train-{fault}", TRAIN, fault) for fault in faults)]
    jobs += [("train-eagle3", [*TRAIN, EAGLE3], "")]
    (path / "said").write_text(run(path, jobs))
    return path


def test_the_drafter_is_trained_in_idle_time(folder: Path):
    steps = rows(folder / "train-")
    assert all(row["drafter/steps"] > 0 and row["drafter/disabled"] == 0 for row in steps)
    assert [row["drafter/version"] for row in steps] == [1, 2, 3, 4]
    assert all(0 < row["idle/recovered_seconds"] <= row["idle/seconds"] for row in steps)
    saved = load_drafter_state(folder / "train-/checkpoints/step-000004" / DRAFTER_STATE)
    early = load_drafter_state(folder / "train-/checkpoints/step-000002" / DRAFTER_STATE)
    assert saved["version"] == 4
    assert all(not torch.equal(saved["model"][name], early["model"][name]) for name in saved["model"])


@pytest.mark.parametrize("fault", ["", "crash", "nan", "eagle3"])
def test_the_policy_is_the_same_with_and_without_drafter_training(folder: Path, fault: str):
    assert_same_policy(folder, f"train-{fault}")
    drafted = sum(row["engine/spec_row_steps"] for row in rows(folder / f"train-{fault}"))
    assert drafted > 0
    if fault == "crash":
        last = rows(folder / f"train-{fault}")[-1]
        assert last["drafter/disabled"] > 0
        assert (folder / "said").read_text().count("drafter training is off for the rest of the run") == 1


def test_states_fill_the_rollout_phase_of_every_rank(folder: Path):
    for rank in range(2):
        events = read_events(folder / "train-", rank)
        for step in range(4):
            mine = [e for e in events if e["step"] == step]
            states = sum(e["dur"] for e in mine if e["kind"] == "state")
            phase = sum(e["dur"] for e in mine if e["kind"] == "span" and e["name"] in ("rollout", "idle"))
            assert states == pytest.approx(phase, abs=0.05)
        names = {e["name"] for e in events if e["kind"] == "state"}
        assert names == ({"BUSY", "IDLE", "TRAINING"} if rank == 0 else {"BUSY", "IDLE"})


def test_the_logs_hold_what_a_report_needs(folder: Path):
    off, train = (list(read_rows(folder / name / ROLLOUTS_FILE)) for name in ("off", "train-"))
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    for plain, drafted, metrics in zip(off, train, rows(folder / "train-"), strict=True):
        assert all(plain[name] == drafted[name] for name in ("responses", "rewards", "lengths", "samples"))
        assert "strategies" not in plain and set(drafted["strategies"]) <= {"none", "trained_3"}
        assert sum(n for n, _ in drafted["by_batch"].values()) == metrics["engine/spec_row_steps"]
        assert sum(n for _, n in drafted["by_batch"].values()) == metrics["engine/spec_emitted_tokens"]
        assert sum(drafted["lengths"]) == metrics["rollout/samples"]
    for rank in range(2):
        curves = [e for e in read_events(folder / "train-", rank) if e["name"] == "curve"]
        assert [e["step"] for e in curves] == [0, 1, 2, 3]
        spans = {e["step"]: e for e in read_events(folder / "train-", rank) if e["name"] == "rollout"}
        for curve in curves:
            running = curve["attrs"]["running"]
            assert (
                running[-1][1] == 0 and max(n for _, n in running) > 0 and max(curve["attrs"]["drafting"]) > 0
            )
            span = spans[curve["step"]]
            assert span["ts"] - 0.5 < curve["attrs"]["start"] < span["ts"] + span["dur"] + 0.5
    samples = list(read_rows(folder / "train-" / "samples.jsonl"))
    drafts = [row["drafts"] for row in samples if "drafts" in row]
    assert drafts and all("".join(d["pieces"]) for d in drafts)
    assert not any("drafts" in row for row in read_rows(folder / "off" / "samples.jsonl"))


def test_a_resumed_run_goes_on_with_the_drafter(folder: Path):
    """Of either kind, on hidden states of either source."""
    cases = [("eagle", "engine"), ("eagle3", "actor")]
    run(folder, [(f"{kind}-{source}", resumed(kind, source, n), "") for kind, source in cases for n in (2, 4)])
    for kind, source in cases:
        name = f"{kind}-{source}"
        assert_same_policy(folder, name)
        states = [load_drafter_state(folder / f"{name}/checkpoints/step-00000{n}" / DRAFTER_STATE) for n in (2, 4)]
        assert [s["about"]["drafter"] for s in states] == [kind, kind]
        assert states[1]["trained_steps"] > states[0]["trained_steps"]
        if source == "engine":
            assert [s["version"] for s in states] == [2, 4]
            continue
        steps = rows(folder / name)  # windows train on the step before: none is there at a start
        assert [row["drafter/version"] for row in steps] == [0, 1, 1, 2]
        assert all(0 < row["drafter/buffer/added"] <= row["rollout/samples"] * row["step"] for row in steps)


def resumed(kind: str, source: str, steps: int) -> list[str]:
    return [*TRAIN, f"{SPEC}.drafter={kind}", f"drafter.online.hidden_states={source}", f"train.num_steps={steps}"]


def test_a_rank_with_a_slow_engine_fetches_fewer_prompts(folder: Path):
    """Both begin with one prompt of eight and fetch the others, experts and all."""
    write_experts(folder / "model", folder / "experts", seed=0)
    experts = [f"model.path={folder / 'experts'}", "actor.ep=2", "actor.router_replay=rollout"]
    few = [*experts, *TRAIN, "rollout.max_running_requests=4"]
    jobs = {"pull": few, "static": [*few, "rollout.schedule=static"]}
    run(folder, [*((name, options, "slow engine") for name, options in jobs.items()), ("off-experts", experts, "")])
    for name in jobs:
        assert_same_policy(folder, name, "off-experts")
        assert all((r["policy/replayed_share"], r["policy/replay_flips"]) == (1, 0) for r in rows(folder / name))
    waited = [sum(row["idle/seconds"] for row in rows(folder / name)) for name in jobs]
    assert waited[0] < waited[1] / 2, waited
    digests = [[row["responses"] for row in read_rows(folder / n / ROLLOUTS_FILE)] for n in (*jobs, "off-experts")]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.nightly
def test_replicas_of_two_ranks_train_as_one(folder: Path):
    overrides = ["rollout.tp=2", "actor.tp=2", "cluster.ranks_per_node=4"]
    run(folder, [("tp-off", overrides, ""), ("tp-train", [*overrides, *TRAIN], "")], ranks=4)
    plain, other = (
        checkpoint_tensors(folder / n / "checkpoints/step-000004") for n in ("tp-off", "tp-train")
    )
    assert all(torch.equal(plain[key], other[key]) for key in plain)
    assert [row["drafter/version"] for row in rows(folder / "tp-train")] == [1, 2, 3, 4]

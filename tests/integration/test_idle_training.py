"""Whole runs that draft, and train the drafter in idle time: the policy stays the same, a resumed run trains on."""

from pathlib import Path

import pytest
import torch
from make_demo_policy import write_experts

from megatron_tlt.drafters.state_file import DRAFTER_STATE, load_drafter_state
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.rollouts import ROLLOUTS_FILE
from tests.helpers.events import read_events
from tests.helpers.runs import assert_same_training, make_model, rows, train_many, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SPEC = "rollout.speculation"
TRAIN = [
    f"{SPEC}.drafter=eagle",
    f"{SPEC}.selector=fixed",
    f"{SPEC}.draft_len=3",
    "idle.train_drafter=true",
    "idle.min_tail_seconds=0",
    "drafter.online.merge_share=1e6",  # a merge in every step
]
EAGLE3, DSPARK = "rollout.speculation.drafter=eagle3", "rollout.speculation.drafter=dspark"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idle")
    alone = {"pre_rollout": False}  # which would have a part of the windows
    config = write_config(path, train={"num_steps": 4, "prompts_per_step": 8}, checkpoint={"every": 2}, idle=alone)
    make_model(path / "model", num_layers=4)  # of which eagle3 reads three
    jobs = {"off": [], "train-": TRAIN, "train-eagle3": [*TRAIN, EAGLE3], "train-dspark": [*TRAIN, DSPARK]}
    jobs["train-nan"] = TRAIN
    train_many(config, jobs, fault={"train-nan": "nan"})
    (path / "said").write_text(train_many(config, {"train-crash": TRAIN}, fault="crash"))
    return path


def test_the_drafter_is_trained_in_idle_time(folder: Path):
    steps = rows(folder / "train-")
    assert all(row["drafter/steps"] > 0 and row["drafter/disabled"] == 0 for row in steps)
    assert [row["drafter/version"] for row in steps] == [1, 2, 3, 4]
    assert all(0 < row["idle/recovered_seconds"] <= row["idle/seconds"] for row in steps)
    assert all(row["idle/seconds"] == pytest.approx(row["idle/rank000"] + row["idle/rank001"]) for row in steps)
    saved = load_drafter_state(folder / "train-/checkpoints/step-000004" / DRAFTER_STATE)
    early = load_drafter_state(folder / "train-/checkpoints/step-000002" / DRAFTER_STATE)
    assert saved["version"] == 4
    assert all(not torch.equal(saved["model"][name], early["model"][name]) for name in saved["model"])


@pytest.mark.parametrize("fault", ["", "crash", "nan", "eagle3", "dspark"])
def test_the_policy_is_the_same_with_and_without_drafter_training(folder: Path, fault: str):
    assert_same_training(folder / "off", folder / f"train-{fault}", 4)
    found = rows(folder / f"train-{fault}")
    assert sum(row["engine/spec_row_steps"] for row in found) > 0
    if fault in ("eagle3", "dspark"):
        assert all(row["drafter/steps"] > 0 and row["drafter/disabled"] == 0 for row in found)
    if fault == "crash":
        assert found[-1]["drafter/disabled"] > 0
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
        assert all(plain[name] == drafted[name] for name in ("responses", "rewards", "samples"))
        assert "strategies" not in plain and set(drafted["strategies"]) <= {"none", "trained_3"}
        assert sum(n for n, _ in drafted["by_batch"].values()) == metrics["engine/spec_row_steps"]
        assert sum(n for _, n in drafted["by_batch"].values()) == metrics["engine/spec_emitted_tokens"]
    for rank in range(2):
        curves = [e for e in read_events(folder / "train-", rank) if e["name"] == "curve"]
        assert [e["step"] for e in curves] == [0, 1, 2, 3]
        spans = {e["step"]: e for e in read_events(folder / "train-", rank) if e["name"] == "rollout"}
        for curve in curves:
            running = curve["attrs"]["running"]
            assert running[-1][1] == 0 and max(n for _, n in running) > 0 and max(curve["attrs"]["drafting"]) > 0
            span = spans[curve["step"]]
            assert span["ts"] - 0.5 < curve["attrs"]["start"] < span["ts"] + span["dur"] + 0.5
    samples = list(read_rows(folder / "train-" / "samples.jsonl"))
    drafts = [row["drafts"] for row in samples if "drafts" in row]
    assert drafts and all("".join(d["pieces"]) for d in drafts)
    assert not any("drafts" in row for row in read_rows(folder / "off" / "samples.jsonl"))


def test_a_resumed_run_goes_on_with_the_drafter(folder: Path):
    """Of either kind, on hidden states of either source."""
    cases = [("eagle", "engine"), ("eagle3", "actor")]
    for steps in (2, 4):
        jobs = {f"{kind}-{source}": resumed(kind, source, steps) for kind, source in cases}
        train_many(folder / "tiny.yaml", jobs, fault="")
    for kind, source in cases:
        name = f"{kind}-{source}"
        assert_same_training(folder / "off", folder / name, 4)
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


@pytest.mark.ci
def test_a_rank_with_a_slow_engine_fetches_fewer_prompts(folder: Path):
    """Both begin with one prompt of eight and fetch the others, experts and all."""
    write_experts(folder / "model", folder / "experts", seed=0)
    experts = [f"model.path={folder / 'experts'}", "actor.ep=2", "actor.router_replay=rollout"]
    few = [*experts, *TRAIN, "rollout.max_running_requests=4"]
    jobs = {"pull": few, "static": [*few, "rollout.schedule=static"]}
    train_many(folder / "tiny.yaml", jobs | {"off-experts": experts}, fault="slow engine")
    for name in jobs:
        assert_same_training(folder / "off-experts", folder / name, 4)
        assert all((r["policy/replayed_share"], r["policy/replay_flips"]) == (1, 0) for r in rows(folder / name))
    waited = [sum(row["idle/seconds"] for row in rows(folder / name)) for name in jobs]
    assert waited[0] < waited[1] / 2, waited
    digests = [[row["responses"] for row in read_rows(folder / n / ROLLOUTS_FILE)] for n in (*jobs, "off-experts")]
    assert digests[0] == digests[1] == digests[2]


POLICIES = {
    "bf16": ["actor.dtype=bf16", "rollout.dtype=bf16"],
    "lora": ["actor.lora.rank=4"],
    "pp2": ["actor.pp=2"],
    "cp2": ["actor.cp=2"],
    "tp2": ["actor.tp=2", "actor.sequence_parallel=true"],
}


@pytest.mark.ci
def test_with_and_without_tlt_policies_of_each_form_are_the_same(folder: Path):
    """In bf16, with adapters, and of each parallel layout of two ranks, whose engines are single."""
    tlt = {"on": TRAIN, "off": []}
    short = ["train.num_steps=2"]
    jobs = {f"{form}-{name}": [*own, *more, *short] for form, own in POLICIES.items() for name, more in tlt.items()}
    train_many(folder / "tiny.yaml", jobs, fault="")
    for form in POLICIES:
        assert_same_training(folder / f"{form}-off", folder / f"{form}-on", 2)
        found = rows(folder / f"{form}-on")
        assert all(row["engine/spec_row_steps"] > 0 and row["drafter/steps"] > 0 for row in found), form
        assert all(row["policy/grad_norm"] > 0 for row in found), form


@pytest.mark.nightly
def test_replicas_of_two_ranks_train_as_one(folder: Path):
    overrides = ["rollout.tp=2", "actor.tp=2", "cluster.ranks_per_node=4"]
    due = "idle.min_steps_per_window=1"  # four ranks on few cores: whether a wait is long enough is a matter of time
    jobs = {"tp-off": overrides, "tp-train": [*overrides, *TRAIN, due]}
    train_many(folder / "tiny.yaml", jobs, ranks=4, fault="")
    assert_same_training(folder / "tp-off", folder / "tp-train", 4)
    assert [row["drafter/version"] for row in rows(folder / "tp-train")] == [1, 2, 3, 4]

"""One rank's upkeep of the drafter, with a real trainer and a real engine, and nobody else in the world."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.rollout import SyncSection
from megatron_tlt.drafter.controller import OnlineDrafterController, Options, tokens_left
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.errors import DrafterError
from megatron_tlt.idle.policy import IdlePolicy
from megatron_tlt.idle.window import IdleWindow, SoloCoordinator
from megatron_tlt.models.config import EMBED
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.types import Prompt, Sample
from tests.helpers.hidden_states import random_chunk
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables

CONFIG = FAMILIES["qwen2"]  # tied embeddings or not: `lookup_tables` gives both tables
WORLD = SimpleNamespace(rank=0, size=1, pulse=lambda **_: None)
PROMPTS = [Prompt(0, "q", (1, 2), "?")]


class PatientCoordinator(SoloCoordinator):
    """Somebody else is busy for a while: the first `looks` looks find that it is not over."""

    def __init__(self, looks: int):
        super().__init__()
        self.looks = looks

    @property
    def is_over(self) -> bool:
        return self.looks <= 0

    def expected_tail(self) -> float | None:
        return None

    def all_done(self) -> bool:
        self.looks -= 1
        return self.is_over


class Backend:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.sink, self.pushed, self.drafters = None, [], []

    def running_lengths(self) -> np.ndarray:
        return np.array([3, 5])

    def collect_hidden_states(self, sink) -> None:
        self.sink = sink

    def begin_update(self, version: int) -> None:
        self.pushed.append(version)

    def update_weights(self, bucket) -> None:
        """Somebody's weights."""

    def update_drafter(self, weights, version: int) -> None:
        self.drafters.append(({name: tensor.clone() for name, tensor in weights.items()}, version))

    def finish_update(self) -> None:
        """Fine."""


class Policy:
    """Two tables and a norm, one version later at each push."""

    policy_version = 0

    def named_weights(self):
        embed, head = lookup_tables(CONFIG)
        yield EMBED, embed + self.policy_version
        yield "model.norm.weight", torch.ones(CONFIG.hidden_size)
        yield "lm_head.weight", head + self.policy_version


def upkeep_of(looks: int, backend: Backend) -> OnlineDrafterController:
    model = EagleModel(CONFIG)
    model.initialise(0)
    trainer = OnlineDrafterTrainer(model, DrafterSection(online={"micro_step_tokens": 64, "warmup_steps": 0}))
    window = IdleWindow(PatientCoordinator(looks), IdlePolicy(min_tail_seconds=0.0), sleep=lambda _: None)
    return OnlineDrafterController(
        WORLD, backend, BucketedSync(SyncSection(), backend, WORLD), window, trainer
    )


def one_step(
    upkeep: OnlineDrafterController, backend: Backend, policy: Policy, monkeypatch
) -> dict[str, float]:
    monkeypatch.setattr("megatron_tlt.drafter.controller._all_reduce", lambda tensor: None)
    upkeep.begin_step(policy.policy_version)
    with upkeep.rollout() as progress:
        progress(2, 0, 10)
        for i, length in enumerate((40, 30, 20)):
            chunk = random_chunk(CONFIG, length, i, policy.policy_version)
            backend.sink(chunk)
    assert backend.sink is None  # nothing is kept of evaluations
    upkeep.wait([Sample(0, 0, [1] * 20, [], "", "stop", policy.policy_version)])
    merged = upkeep.merge()
    policy.policy_version += 1
    upkeep.push(policy)
    return merged | upkeep.take_figures()


def test_a_step_trains_merges_and_pushes_both(monkeypatch):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    assert not backend.drafters  # the engine was built with the trainer's weights
    before = {name: tensor.clone() for name, tensor in upkeep.trainer.weights().items()}
    figures = one_step(upkeep, backend, policy, monkeypatch)
    assert (
        figures["drafter/steps"] == 3 and figures["drafter/version"] == 1 and figures["drafter/disabled"] == 0
    )
    assert 0 < figures["idle/recovered_seconds"] <= figures["idle/seconds"]
    (weights, version), *rest = backend.drafters
    assert (version, rest, backend.pushed) == (1, [], [0, 1])
    assert weights.keys() == before.keys() and not any("embed" in name or "head" in name for name in weights)
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert sorted(upkeep.trainer.tables) == [0, 1]
    embed, head = lookup_tables(CONFIG)
    for version in (0, 1):  # each version's own tables, not the last push's
        kept = upkeep.trainer.tables[version]
        assert torch.equal(kept[0], embed + version) and torch.equal(kept[1], head + version)


def test_progress_is_a_sign_of_life_with_figures():
    told = []
    world = SimpleNamespace(rank=0, size=1, pulse=lambda **figures: told.append(figures))
    window = IdleWindow(SoloCoordinator(), IdlePolicy())
    upkeep = OnlineDrafterController(world, Backend(), BucketedSync(SyncSection(), Backend(), WORLD), window)
    with upkeep.rollout() as progress:
        progress(2, 1, 10)
    (figures,) = told
    left = tokens_left(np.array([3, 5]), 1, np.array([256.0]))
    assert figures == {"state": "BUSY", "running": 2, "queued": 1, "longest": 5, "left": left}


def test_nobody_trained_nothing_is_pushed(monkeypatch):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(0, backend)
    upkeep.push(policy)
    figures = one_step(upkeep, backend, policy, monkeypatch)
    assert figures["drafter/steps"] == 0 and figures["drafter/version"] == 0
    assert backend.drafters == [] and backend.pushed == [0, 1]


def test_a_failure_turns_training_off_and_the_run_goes_on(monkeypatch, caplog):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    one_step(upkeep, backend, policy, monkeypatch)
    good = {name: tensor.clone() for name, tensor in upkeep.trainer.weights().items()}

    def fail(sample):
        raise DrafterError("on purpose")

    upkeep.trainer._learn = fail
    upkeep._window.coordinator.looks = 4
    figures = one_step(upkeep, backend, policy, monkeypatch)
    assert figures["drafter/disabled"] == 1 and len(backend.drafters) == 1
    assert [r.getMessage() for r in caplog.records] == [
        "drafter training is off for the rest of the run: on purpose"
    ]
    assert all(torch.equal(good[name], tensor) for name, tensor in upkeep.trainer.weights().items())
    upkeep._window.coordinator.looks = 4
    with upkeep.rollout():
        assert backend.sink is None  # nothing is kept that nobody trains on
    assert upkeep.wait([]).steps == 0
    tables = sorted(upkeep.trainer.tables)
    policy.policy_version += 1
    upkeep.push(policy)
    assert sorted(upkeep.trainer.tables) == tables


def test_a_failure_elsewhere_ends_training_here(monkeypatch, caplog):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    merge = upkeep.trainer.merge
    upkeep.trainer.merge = lambda *a: replace(merge(*a), disabled=(1,))
    assert one_step(upkeep, backend, policy, monkeypatch)["drafter/disabled"] == 1
    upkeep._window.coordinator.looks = 4
    with upkeep.rollout():
        assert backend.sink is None
    assert upkeep.wait([]).steps == 0 and upkeep.trainer.enabled
    assert not caplog.records  # rank 1 has said why


def test_a_mean_that_is_not_finite_ends_training_with_one_warning(monkeypatch, caplog):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    monkeypatch.setattr(
        "megatron_tlt.drafter.flat_state.FlatState.weighted", lambda *a: torch.tensor([float("nan")])
    )
    figures = one_step(upkeep, backend, policy, monkeypatch)
    assert figures["drafter/disabled"] == 1 and not backend.drafters
    assert len(caplog.records) == 1


def test_a_resumed_run_pushes_the_drafter_it_stopped_with(monkeypatch):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    one_step(upkeep, backend, policy, monkeypatch)
    state, saved = upkeep.state_dict(), upkeep.drafter_state()
    again = Backend()
    resumed = upkeep_of(4, again)
    resumed.load_state_dict(state, saved)
    resumed.push(policy)
    (weights, version), *rest = again.drafters
    assert (version, rest) == (1, [])
    assert all(torch.equal(weights[name], tensor) for name, tensor in upkeep.trainer.weights().items())


def test_a_checkpoint_from_before_the_first_merge_counts_too():
    """Its drafter may be another than the one that this run is configured to start from."""
    first = upkeep_of(0, Backend())
    first.trainer.weights()["fc.weight"].mul_(2.0)
    again = Backend()
    resumed = upkeep_of(0, again)
    resumed.load_state_dict(first.state_dict(), first.drafter_state())
    resumed.push(Policy())
    ((weights, version),) = again.drafters
    assert version == 0 and torch.equal(weights["fc.weight"], first.trainer.weights()["fc.weight"])
    resumed.push(Policy())
    assert len(again.drafters) == 1


@pytest.mark.parametrize("has_eagle", [True, False])
def test_a_run_that_does_not_train_drafts_with_the_checkpoint_and_hands_it_on(monkeypatch, has_eagle):
    backend, policy = Backend(), Policy()
    upkeep = upkeep_of(4, backend)
    upkeep.push(policy)
    one_step(upkeep, backend, policy, monkeypatch)
    again = Backend()
    window = IdleWindow(SoloCoordinator(), IdlePolicy(train_drafter=False), sleep=lambda _: None)
    sync = BucketedSync(SyncSection(), again, WORLD)
    resumed = OnlineDrafterController(WORLD, again, sync, window, None, Options(has_eagle=has_eagle))
    resumed.load_state_dict(upkeep.state_dict(), upkeep.drafter_state())
    for _ in range(2):
        resumed.push(policy)
    assert [version for _, version in again.drafters] == ([1] if has_eagle else [])
    assert resumed.drafter_state()["version"] == 1
    assert resumed.merge() == {}


def test_lengths_are_thinned_evenly_for_a_checkpoint():
    upkeep = upkeep_of(0, Backend())
    upkeep._lengths = np.arange(1.0, 1001.0)
    kept = upkeep.state_dict()["lengths"]
    assert len(kept) <= 256 and np.mean(kept) == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize(
    ("running", "waiting", "lengths", "expected"),
    [
        ([], 2, [10.0, 30.0], 40.0),
        ([0, 0], 0, [10.0, 30.0], 40.0),  # twice the mean
        ([10], 0, [10.0, 30.0], 20.0),  # only the longer one is still possible
        ([30, 30], 0, [10.0, 30.0], 30.0),  # as long as any before: half as much again
        ([0, 28], 1, [10.0, 30.0], 42.0),
        ([0, 10], 0, [10.0, 90.0], 160.0),  # the longest of two holds both rows
    ],
)
def test_tokens_left(running, waiting, lengths, expected):
    assert tokens_left(np.array(running), waiting, np.array(lengths)) == pytest.approx(expected)

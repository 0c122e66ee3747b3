"""One rank's `OnlineDrafterController` with a real trainer, in a world of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.controller import OnlineDrafterController
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.errors import DrafterError
from megatron_tlt.models.eagle.model import EagleModel
from tests.helpers.hidden_states import random_chunk
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables

CONFIG = FAMILIES["qwen2"]  # tied embeddings or not: `lookup_tables` gives both tables
WORLD = SimpleNamespace(rank=0, size=1)


class Backend:
    """Keeps the callback for hidden states."""

    sink = None

    def lookup_tables(self):
        return lookup_tables(CONFIG)

    def collect_hidden_states(self, sink) -> None:
        self.sink = sink


def make(backend: Backend | None = None, from_actor: bool = False) -> OnlineDrafterController:
    model = EagleModel(CONFIG)
    model.initialise(0)
    section = DrafterSection(online={"micro_step_tokens": 64, "warmup_steps": 0})
    trainer = OnlineDrafterTrainer(model, section, from_actor=from_actor)
    return OnlineDrafterController(WORLD, backend or Backend(), trainer)


def push(controller: OnlineDrafterController) -> tuple[dict, int] | None:
    """What a weight push does with the drafter: the tensors that go to the engine."""
    published = controller.unpublished()
    if published is None:
        return None
    controller.mark_published(published[1])
    return {name: tensor.clone() for name, tensor in published[0].items()}, published[1]


def one_step(controller: OnlineDrafterController, backend: Backend, version: int = 0, steps: int = 4) -> dict:
    controller.begin_step(version)
    with controller.collecting():
        for i, length in enumerate((40, 30, 20)):
            if backend.sink is not None:
                backend.sink(random_chunk(CONFIG, length, i, version))
    assert backend.sink is None  # hidden states of evaluations are not collected
    for _ in range(steps):
        try:
            controller.train_step()
        except DrafterError:
            break
    return controller.merge()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr("megatron_tlt.drafter.controller._all_reduce", lambda tensor: None)


def test_a_step_trains_merges_and_publishes():
    backend = Backend()
    controller = make(backend)
    before = {name: tensor.clone() for name, tensor in controller.trainer.weights().items()}
    assert push(controller) is None
    metrics = one_step(controller, backend)
    assert metrics["drafter/version"] == 1 and metrics["drafter/disabled"] == 0
    assert controller.num_samples() == 3
    assert all(name.startswith("drafter/buffer/") for name in controller.buffer_metrics())
    weights, version = push(controller)
    assert version == 1
    assert weights.keys() == before.keys() and not any("embed" in name or "head" in name for name in weights)
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert push(controller) is None, "the engines have it"


def test_a_failure_turns_training_off():
    backend = Backend()
    controller = make(backend)
    push(controller)
    one_step(controller, backend)
    good = {name: tensor.clone() for name, tensor in controller.trainer.weights().items()}
    assert push(controller) is not None

    def fail(sample):
        raise DrafterError("on purpose")

    controller.trainer._learn = fail
    assert one_step(controller, backend, 1)["drafter/disabled"] == 1
    assert controller.disabled_reason == "on purpose"
    assert push(controller) is None
    assert all(torch.equal(good[name], tensor) for name, tensor in controller.trainer.weights().items())
    with controller.collecting():
        assert backend.sink is None  # hidden states that no rank trains on are not collected
    assert controller.train_step() is None


def test_a_resumed_run_publishes_the_drafter_of_its_checkpoint():
    backend = Backend()
    controller = make(backend)
    push(controller)
    one_step(controller, backend)
    resumed = make()
    resumed.load_state_dict(controller.state_dict())
    weights, version = push(resumed)
    assert version == 1 and push(resumed) is None
    assert all(torch.equal(weights[name], tensor) for name, tensor in controller.trainer.weights().items())


@pytest.mark.parametrize("has_drafter", [True, False])
def test_a_run_that_does_not_train_serves_the_checkpoint_and_keeps_it(has_drafter):
    backend = Backend()
    controller = make(backend)
    push(controller)
    one_step(controller, backend)
    resumed = OnlineDrafterController(WORLD, backend, has_drafter=has_drafter)
    resumed.load_state_dict(controller.state_dict())
    versions = [published[1] for _ in range(2) if (published := push(resumed)) is not None]
    assert versions == ([1] if has_drafter else [])
    assert resumed.state_dict()["version"] == 1
    assert resumed.merge() == {} and resumed.train_step() is None


def test_windows_train_on_what_the_actor_handed_out_in_the_step_before():
    backend = Backend()
    controller = make(backend, from_actor=True)
    versions, chunks = [], [[random_chunk(CONFIG, n, n, v) for n in (40, 30, 20)] for v in range(4)]
    for version in range(4):
        one_step(controller, backend, version, steps=8)  # the engine is not asked for any
        versions.append(controller.trainer.version)
        controller.trainer.take_step(chunks[version], left_out=version)
    assert versions == [0, 1, 2, 3], "nothing to train on in the first step"
    held = sorted((key[0], key[1]) for key in controller.trainer.buffer._entries)
    # Of the step before all responses, of older ones the longer half; none older than max_age for the next policy.
    assert held == [(2, 30), (2, 40), (3, 20), (3, 30), (3, 40)]
    assert controller.buffer_metrics()["drafter/buffer/dropped_by_budget"] == 0 + 1 + 2 + 3
    controller.trainer.take_step([], 0)
    assert controller.num_samples() == 5, "an update without responses takes none away"

"""One rank's `OnlineDrafterController` with a real trainer, in a world of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_tlt.drafter.controller import OnlineDrafterController
from megatron_tlt.errors import DrafterError
from tests.helpers.hidden_states import random_chunk
from tests.helpers.online import CONFIG, online_trainer
from tests.helpers.tiny_drafters import lookup_tables

WORLD = SimpleNamespace(rank=0, size=1)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Backend:
    """Keeps the callback for hidden states."""

    sink = None

    def lookup_tables(self):
        return lookup_tables(CONFIG)

    def collect_hidden_states(self, sink) -> None:
        self.sink = sink


def make(from_actor: bool = False) -> OnlineDrafterController:
    return OnlineDrafterController(WORLD, Backend(), online_trainer(lengths=(), from_actor=from_actor))


def weights(controller: OnlineDrafterController) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in controller.trainer.weights().values()])


def sync(controller: OnlineDrafterController) -> tuple[torch.Tensor, int] | None:
    """What a weight sync does with the drafter: the tensors that go to the engine, flat, and their version."""
    published = controller.unpublished()
    if published is None:
        return None
    controller.mark_published(published[1])
    return torch.cat([tensor.flatten() for tensor in published[0].values()]), published[1]


def one_step(
    controller: OnlineDrafterController, version: int = 0, steps: int = 4, broken: bool = False, at_once: bool = True
) -> dict:
    """A rollout of three responses and a window; `broken`: hidden states that are not finite."""
    controller.begin_step(version)
    backend = controller._backend
    with controller.collecting():
        for i, length in enumerate((40, 30, 20)):
            chunk = random_chunk(CONFIG, length, i, version)
            if backend.sink is not None:
                backend.sink(replace(chunk, hidden=chunk.hidden * torch.inf) if broken else chunk)
    assert backend.sink is None, "hidden states of evaluations are not collected"
    for _ in range(steps):
        try:
            controller.train_step()
        except DrafterError:
            break
    return controller.merge(at_once)


def test_a_step_trains_merges_and_publishes():
    controller = make()
    before = weights(controller).clone()
    assert sync(controller) is None
    metrics = one_step(controller)
    assert metrics == {"drafter/version": 1, "drafter/disabled": 0, "drafter/coverage": 1}
    assert controller.num_samples() == 3
    assert controller.buffer_metrics()["drafter/buffer/added"].value == 3
    published, version = sync(controller)
    assert version == 1 and torch.equal(published, weights(controller)) and not torch.equal(published, before)
    assert sync(controller) is None, "the engines have it"


def test_a_merge_that_was_put_off_is_made_for_a_checkpoint():
    controller = make()
    one_step(controller)
    sync(controller)
    controller.trainer.merge_seconds = 1e9
    assert one_step(controller, 1, at_once=False)["drafter/version"] == 1
    assert sync(controller) is None
    assert controller.state_dict()["version"] == 2
    published, version = sync(controller)
    assert version == 2 and torch.equal(published, weights(controller))


def test_a_failure_turns_training_off():
    controller = make()
    one_step(controller)
    good, _ = sync(controller)
    good = good.clone()
    assert one_step(controller, 1, broken=True)["drafter/disabled"] == 1
    assert "gradient norm is nan" in controller.disabled_reason
    assert sync(controller) is None and torch.equal(good, weights(controller))
    with controller.collecting():
        assert controller._backend.sink is None, "hidden states that no rank trains on are not collected"
    assert controller.train_step() is None


@pytest.mark.parametrize(
    ("trains", "has_drafter", "published"), [(True, True, [1]), (False, True, [1]), (False, False, [])]
)
def test_a_resumed_run_publishes_the_drafter_of_its_checkpoint_and_keeps_it(trains, has_drafter, published):
    controller = make()
    one_step(controller)
    trainer = online_trainer(lengths=()) if trains else None
    resumed = OnlineDrafterController(WORLD, Backend(), trainer, has_drafter=has_drafter)
    resumed.load_state_dict(controller.state_dict())
    found = [sync(resumed) for _ in range(2)]
    assert [version for _, version in filter(None, found)] == published
    assert all(torch.equal(tensors, weights(controller)) for tensors, _ in filter(None, found))
    assert resumed.state_dict()["version"] == 1
    if not trains:
        assert resumed.merge() == {} and resumed.train_step() is None


def test_windows_train_on_what_the_actor_handed_out_in_the_step_before():
    controller = make(from_actor=True)
    trainer, versions = controller.trainer, []
    for version in range(4):
        one_step(controller, version, steps=8)  # the engine is not asked for any
        versions.append(trainer.version)
        trainer.take_step([random_chunk(CONFIG, n, n, version) for n in (40, 30, 20)], left_out=version)
    assert versions == [0, 1, 2, 3], "nothing to train on in the first step"
    # None older than max_age for the next policy.
    held = sorted((key[0], key[1]) for key in trainer.buffer._entries)
    assert held == [(version, n) for version in range(4) for n in (20, 30, 40)]
    assert controller.buffer_metrics()["drafter/buffer/dropped_by_budget"].value == 0 + 1 + 2 + 3
    trainer.take_step([], 0)
    assert controller.num_samples() == 12, "an update without responses takes none away"

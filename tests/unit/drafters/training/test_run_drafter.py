"""What a run's steps do with its drafter, in training or served, on one rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafters.training.run_drafter import RunDrafter
from megatron_tlt.errors import CheckpointError, DrafterError
from tests.helpers.pairs import block_config
from tests.helpers.tiny_drafters import CONFIG, DEEP, lookup_tables, online_trainer, random_chunk

EAGLE3, BLOCK = Eagle3Config.of(DEEP["llama"], (0, 2, 6)), block_config(DEEP["llama"])


class Backend:
    """Keeps the callback for hidden states."""

    sink = None

    def collect_hidden_states(self, sink, offer=None) -> None:
        self.sink = sink


def make(from_actor: bool = False) -> OnlineDrafterTrainer:
    return online_trainer(lengths=(), from_actor=from_actor)


def weights(drafter: OnlineDrafterTrainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in drafter.weights().values()])


def sync(drafter: RunDrafter) -> tuple[torch.Tensor, int] | None:
    """What a weight sync does with the drafter: the tensors that go to the engine, flat, and their version."""
    published = drafter.unpublished()
    if published is None:
        return None
    drafter.mark_published(published[1])
    return torch.cat([tensor.flatten() for tensor in published[0].values()]), published[1]


def one_step(drafter: RunDrafter, version: int = 0, steps: int = 4, broken: bool = False, at_once: bool = True) -> dict:
    """A rollout of three responses and a window; `broken`: hidden states that are not finite."""
    drafter.begin_step(version, lambda: lookup_tables(CONFIG))
    backend = Backend()
    with drafter.collecting(backend):
        for i, length in enumerate((40, 30, 20)):
            chunk = random_chunk(CONFIG, length, i, version)
            if backend.sink is not None:
                backend.sink(replace(chunk, hidden=chunk.hidden * torch.inf) if broken else chunk)
    assert backend.sink is None, "hidden states of evaluations are not collected"
    for _ in range(steps):
        try:
            drafter.train_step()
        except DrafterError:
            break
    return drafter.merge(at_once)


def test_a_step_trains_merges_and_publishes():
    drafter = make()
    before = weights(drafter).clone()
    assert sync(drafter) is None
    metrics = one_step(drafter)
    assert metrics == {"drafter/version": 1, "drafter/disabled": 0, "drafter/coverage": 1}
    assert drafter.num_samples() == 3
    assert drafter.buffer_metrics()["drafter/buffer/added"].value == 3
    published, version = sync(drafter)
    assert version == 1 and torch.equal(published, weights(drafter)) and not torch.equal(published, before)
    assert sync(drafter) is None, "the engines have it"


def test_a_step_without_responses_has_no_coverage():
    drafter = make()
    one_step(drafter)
    drafter.begin_step(1, lambda: lookup_tables(CONFIG))
    assert drafter.merge() == {"drafter/version": 1, "drafter/disabled": 0}


def test_a_merge_that_was_put_off_is_made_for_a_checkpoint():
    drafter = make()
    one_step(drafter)
    sync(drafter)
    drafter._merge_seconds = 1e9
    assert one_step(drafter, 1, at_once=False)["drafter/version"] == 1
    assert sync(drafter) is None
    assert drafter.state_dict()["version"] == 2
    published, version = sync(drafter)
    assert version == 2 and torch.equal(published, weights(drafter))


def test_a_failure_turns_training_off():
    drafter = make()
    one_step(drafter)
    good, _ = sync(drafter)
    good = good.clone()
    assert one_step(drafter, 1, broken=True)["drafter/disabled"] == 1
    assert sync(drafter) is None and torch.equal(good, weights(drafter))
    with drafter.collecting(backend := Backend()):
        assert backend.sink is None, "hidden states that no rank trains on are not collected"
    assert drafter.train_step() is None


def test_a_failure_on_another_replica_ends_training_here_with_the_merge():
    def all_reduce(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float64:  # the rows of a merge: the other rank has trained nothing and has failed
            tensor[1, 2] = 1.0

    drafter = online_trainer(world=SimpleNamespace(rank=0, size=2, all_reduce=all_reduce))
    drafter.train_step()
    metrics = drafter.merge()
    assert (metrics["drafter/version"], metrics["drafter/disabled"]) == (1, 1), "what was trained here is merged"
    drafter.begin_step(1, lambda: lookup_tables(CONFIG))
    assert drafter.num_samples() and drafter.train_step() is None
    assert drafter.merge()["drafter/disabled"] == 1, "this rank has not failed"


@pytest.mark.parametrize(
    ("trains", "has_drafter", "published"), [(True, True, [1]), (False, True, [1]), (False, False, [])]
)
def test_a_resumed_run_publishes_the_drafter_of_its_checkpoint_and_keeps_it(trains, has_drafter, published):
    drafter = make()
    one_step(drafter)
    resumed = make() if trains else RunDrafter(drafter.model.config if has_drafter else None)
    resumed.load_state_dict(drafter.state_dict())
    found = [sync(resumed) for _ in range(2)]
    assert [version for _, version in filter(None, found)] == published
    assert all(torch.equal(tensors, weights(drafter)) for tensors, _ in filter(None, found))
    assert resumed.state_dict()["version"] == 1
    if not trains:
        assert resumed.merge() == {} and resumed.train_step() is None


def trainer_of(config: DrafterConfig) -> OnlineDrafterTrainer:
    model = KINDS[config.kind].build_model(config)
    model.initialise(0)
    return OnlineDrafterTrainer(model, DrafterSection())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (EAGLE3, replace(EAGLE3, aux_layers=(0, 3, 6)), r"eagle3_layers is \[0, 2, 6\], not \[0, 3, 6\]"),
        (EAGLE3, replace(EAGLE3, layer=replace(EAGLE3.layer, rope_theta=7.0)), r"layer\.rope_theta is 1.*, not 7\.0"),
        (BLOCK, replace(BLOCK, block_size=4), "block_size is 6, not 4"),
        (BLOCK, EAGLE3, "drafter is 'dspark', not 'eagle3'"),
    ],
)
def test_a_checkpoint_of_another_drafter_is_refused_though_its_tensors_may_fit(old, new, says):
    state = trainer_of(old).state_dict()
    for drafter in (trainer_of(new), RunDrafter(new)):
        with pytest.raises(CheckpointError, match=says):
            drafter.load_state_dict(state)
    for drafter in (trainer_of(old), RunDrafter(old), RunDrafter(None)):
        drafter.load_state_dict(state)


def test_windows_train_on_what_the_actor_handed_out_in_the_step_before():
    trainer, versions = make(from_actor=True), []
    for version in range(4):
        one_step(trainer, version, steps=8)  # the engine is not asked for any
        versions.append(trainer.version)
        trainer.take_step([random_chunk(CONFIG, n, n, version) for n in (40, 30, 20)], left_out=version)
    assert versions == [0, 1, 2, 3], "nothing to train on in the first step"
    # None older than max_age for the next policy.
    held = sorted((key[0], key[1]) for key in trainer.buffer._entries)
    assert held == [(version, n) for version in range(4) for n in (20, 30, 40)]
    assert trainer.buffer_metrics()["drafter/buffer/dropped_by_budget"].value == 0 + 1 + 2 + 3
    trainer.take_step([], 0)
    assert trainer.num_samples() == 12, "an update without responses takes none away"

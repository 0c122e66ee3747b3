"""The RL loop's order of things, with parts that only note their calls."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_tlt.trainer.loop import RLTrainer
from megatron_tlt.trainer.recovery import Recovery, TrainState
from tests.helpers.checked_configs import make


def trainer_at(step: int, num_steps: int, newest: int | None, **sections: Any) -> tuple[RLTrainer, MagicMock]:
    """A trainer after `step` steps, in a run whose newest checkpoint is `newest`; and all its parts."""
    parts, state = MagicMock(), TrainState(step)
    parts.checkpoints.newest, parts.checkpoints.is_behind = newest, False
    parts.sampler.sample.return_value, parts.assembler.exchange.return_value = (MagicMock(),) * 3, (MagicMock(),) * 2
    own = {name: getattr(parts, name) for name in ("prompts", "carried", "backend", "drafter")}
    built = {field.name: getattr(parts, field.name) for field in fields(RLTrainer)}
    config = make(train={"num_steps": num_steps, "run_dir": "r"}, **sections)
    return RLTrainer(**built | {"config": config, "state": state, "recovery": Recovery(state=state, **own)}), parts


def calls(parts: MagicMock, *names: str) -> list[str]:
    return [name for name, *_ in parts.mock_calls if name in names]


def test_a_run_without_steps_left_opens_no_file_whose_later_rows_it_would_remove() -> None:
    trainer, parts = trainer_at(step=2, num_steps=2, newest=4, eval={"every": 0})
    assert not trainer.begin() and not calls(parts, "metrics.start")
    assert "r is already at step 2 of train.num_steps = 2" in parts.metrics.note.call_args.args[0]


def test_a_step_ends_before_its_evaluation_in_the_time_that_a_signal_must_leave() -> None:
    trainer, parts = trainer_at(step=3, num_steps=9, newest=None, eval={"every": 4})
    trainer.step()
    order = "shutdown.sync", "shutdown.step_done", "evaluator.run"
    assert calls(parts, *order) == list(order)


def test_the_engine_is_released_for_the_update_and_gets_the_weights_behind_it() -> None:
    """Its memory is the update's."""
    trainer, parts = trainer_at(step=3, num_steps=9, newest=None)
    trainer.step()
    order = "sampler.sample", "sampler.release", "policy.train_step", "sync.push"
    assert calls(parts, *order) == list(order)
    of_policy = parts.policy.policy_version, parts.sync.fingerprint.return_value
    parts.rollout_cache.begin_step.assert_called_once_with(4, *of_policy)


@pytest.mark.parametrize(("newest", "is_behind"), [(2, True), (6, False), (None, False)])
def test_an_evaluation_that_was_dropped_is_added_to_the_newest_checkpoint_alone(newest, is_behind) -> None:
    """A save of an earlier one removes all later ones."""
    trainer, parts = trainer_at(step=2, num_steps=2, newest=newest, eval={"every": 2})
    assert trainer.begin() and parts.evaluator.run.called
    assert parts.checkpoints.is_behind == is_behind


@pytest.mark.parametrize("unsaved", [None, "updates were not finite"])
def test_the_last_checkpoint_pushes_no_other_out_where_its_weights_may_be_broken(unsaved: str | None) -> None:
    trainer, parts = trainer_at(step=9, num_steps=9, newest=8)
    parts.nonfinite.unsaved.return_value = unsaved
    trainer.finish()
    assert parts.checkpoints.save_now.call_args.kwargs == {"prune": unsaved is None}
    parts.rollout_cache.clear.assert_called_once_with(9)  # an earlier checkpoint may have been evaluated

"""Steps in which no response was trained on: counted, named, and the end of a run that has too many in a row."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_tlt.algorithms.base import RewardTable
from megatron_tlt.config.root import Config
from megatron_tlt.errors import CheckpointError, TrainingError
from megatron_tlt.trainer.batch_assembly import ScoredRows, StepTable
from megatron_tlt.trainer.empty_steps import EmptySteps
from megatron_tlt.trainer.loop import RLTrainer
from megatron_tlt.trainer.recovery import Recovery, TrainState
from megatron_tlt.types import TrainOutput

EMPTY, UPDATED = TrainOutput(0, {"empty_step": 1.0}, skipped=True), TrainOutput(1, {"grad_norm": 0.5})


def table_of(scored: int = 4, kept: int = 4, truncated: int = 4, aborted: int = 0) -> StepTable:
    """A step's `scored` responses, of which the first is right; the last ones `truncated` or `aborted`."""

    def columns(count: int) -> dict[str, np.ndarray]:
        at = np.arange(count)
        cut, failed = at >= count - truncated, at >= count - aborted
        return {"reward": (at == 0) * 1.0, "length": at + 1, "truncated": cut, "aborted": failed}

    all_rows = columns(scored)
    of_step = ScoredRows(value=all_rows["reward"], correct=all_rows["reward"] == 1, is_shaped=False, **all_rows)
    at = np.arange(kept)
    rewards = RewardTable(prompt_id=at, sample_index=at, kl_sum=np.zeros(kept), **columns(kept))
    return StepTable(rewards, at, at, of_step)


def steps_of(limit: int = 3, state: TrainState | None = None, **sections: Any) -> EmptySteps:
    tree = {"model": {"path": "m"}, "train": {"max_lost_steps": limit}, "rollout": {"max_tokens": 64}, **sections}
    return EmptySteps(Config.model_validate(tree), state or TrainState(), is_main=True)


@pytest.mark.parametrize(
    ("algorithm", "table", "why"),
    [
        (
            {"mask_truncated": True},
            table_of(),
            "algorithm.mask_truncated leaves out 100% of the responses, which rollout.max_tokens = 64 has cut off",
        ),
        ({}, table_of(truncated=0, aborted=4), "the environments of 100% of the responses failed"),
        (
            {"mask_truncated": True},
            table_of(truncated=3, aborted=1),
            r"algorithm.mask_truncated leaves out 75% .*; the environments of 25% of the responses failed",
        ),
        (
            {"dynamic_sampling": True},
            table_of(kept=0),
            r"dynamic sampling kept no group, .*mean reward 0.25, 25.0% of responses correct\): change the prompts",
        ),
    ],
)
def test_steps_without_a_trained_response_end_the_run(algorithm, table, why, caplog) -> None:
    empty = steps_of(algorithm=algorithm)
    for step in (1, 2, 3):
        empty.check()
        assert empty.look(step, table, EMPTY) == {"policy/empty_in_a_row": step}
    with pytest.raises(TrainingError, match=rf"no update in 3 steps .*train.max_lost_steps = 3.*{why}"):
        empty.check()
    has_own = len(table.rewards.length) == 0  # of dynamic sampling
    assert [text.partition(":")[0] for text in caplog.messages] == ([] if has_own else [f"step {i}" for i in (1, 2, 3)])


@pytest.mark.parametrize(("limit", "ends"), [(1, True), (2, False), (0, False)])
def test_the_limit_is_a_setting_and_an_update_begins_the_count_anew(limit: int, ends: bool) -> None:
    empty = steps_of(limit, algorithm={"mask_truncated": True})
    empty.look(1, table_of(), EMPTY)
    with pytest.raises(TrainingError) if ends else nullcontext():
        empty.check()
    assert empty.look(2, table_of(truncated=3), UPDATED) == {"policy/empty_in_a_row": 0}
    empty.check()


def test_a_step_of_which_no_group_is_complete_is_none_of_them(caplog: pytest.LogCaptureFixture) -> None:
    """As the first ones with `rollout.carry_over`."""
    empty = steps_of(1, rollout={"carry_over": 16})
    assert empty.look(1, table_of(scored=0, kept=0, truncated=0), EMPTY) == {"policy/empty_in_a_row": 0}
    empty.check()
    assert not caplog.records


def test_empty_steps_before_and_behind_a_resume_are_counted_together() -> None:
    """A job that is preempted every other step would never end."""
    names = ("prompts", "carried", "backend", "drafter")
    before, behind = (Recovery(state=TrainState(), **{name: MagicMock() for name in names}) for _ in range(2))
    empty = steps_of(2, before.state)
    empty.look(1, table_of(), EMPTY)
    empty.check()
    saved = before.state_dict()
    with pytest.raises(CheckpointError, match="has no 'empty_steps': another version wrote it"):
        behind.load({name: value for name, value in saved.items() if name != "empty_steps"})
    behind.load(saved)
    behind.backend.load_state_dict.assert_called_with(saved["engine"])  # type: ignore[attr-defined]
    resumed = steps_of(2, behind.state)
    resumed.look(2, table_of(), EMPTY)
    with pytest.raises(TrainingError, match="in 2 steps in a row"):
        resumed.check()


def trainer_of(has_stepped: bool) -> RLTrainer:
    """A run of which only policy, state and configuration are there."""
    tree = {"model": {"path": "m"}, "algorithm": {"mask_truncated": True}}
    nonfinite = SimpleNamespace(look=lambda step, batch, out: {}, unsaved=lambda: None, check=lambda: None)
    policy = MagicMock(has_stepped=has_stepped, train_step=lambda batch: EMPTY)
    names = {field.name for field in fields(RLTrainer)} - {"config", "state"}
    parts = {name: MagicMock() for name in names} | {"nonfinite": nonfinite, "policy": policy}
    return RLTrainer(config=Config.model_validate(tree), state=TrainState(), **parts)


def test_a_run_whose_responses_are_all_masked_ends() -> None:
    trainer = trainer_of(has_stepped=False)
    for step in (1, 2, 3):
        metrics = trainer._update(MagicMock(), table_of())
        assert metrics == {"empty_step": 1.0, "policy/empty_in_a_row": step}
        with pytest.raises(TrainingError, match="mask_truncated") if step == 3 else nullcontext():
            trainer.save_if_due()


@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_run_that_ends_without_an_update_says_so(has_stepped: bool) -> None:
    trainer = trainer_of(has_stepped)
    trainer.finish()
    said = [call.args[0] for call in trainer.metrics.note.call_args_list]  # type: ignore[attr-defined]
    why = "there was no update yet, the next start begins anew"
    assert said == ([] if has_stepped else [f"no checkpoint of step 0: {why}"])
    assert trainer.checkpoints.save_now.called == has_stepped  # type: ignore[attr-defined]

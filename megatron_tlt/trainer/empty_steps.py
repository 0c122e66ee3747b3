"""Steps without an update, since no response was trained on: they are counted, and too many in a row end the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from megatron_tlt.errors import TrainingError

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.trainer.batch_assembly import StepTable
    from megatron_tlt.trainer.recovery import TrainState
    from megatron_tlt.types import TrainOutput

_log = logging.getLogger(__name__)


class EmptySteps:
    """Counts steps in a row in which responses were scored and none was trained on. All ranks count alike."""

    def __init__(self, config: Config, state: TrainState, is_main: bool):
        """`state`: of the run, which holds the count."""
        self._config, self._state, self._is_main = config, state, is_main
        self._why: str | None = None  # of the last step, if it was counted

    def look(self, step: int, table: StepTable, out: TrainOutput) -> dict[str, float]:
        """After the update of `step` (1-based): counts an empty one. Returns metrics. Mutates the run's state.

        A step without a complete group, as the first ones with `rollout.carry_over`, leaves the count as it is. Rank 0
        logs a warning of groups that have no trained response; dynamic sampling has one of its own.
        """
        is_empty, self._why = bool(out.metrics.get("empty_step")), None
        if is_empty and len(table.scored.length):
            self._state.empty_steps += 1
            self._why = self._reason(table)
            if self._is_main and len(table.rewards.length):
                _log.warning("step %d: no update, since no response is trained on: %s", step, self._why)
        elif not is_empty:
            self._state.empty_steps = 0
        return {"policy/empty_in_a_row": float(self._state.empty_steps)}

    def check(self) -> None:
        """Raises TrainingError on every rank after `train.max_lost_steps` such steps in a row."""
        count, limit = self._state.empty_steps, self._config.train.max_lost_steps
        if self._why is not None and limit and count >= limit:
            raise TrainingError(
                f"no update in {count} steps in a row (train.max_lost_steps = {limit}), since no response was trained "
                f"on; in the last one {self._why}"
            )

    def _reason(self, table: StepTable) -> str:
        """Why no response of the step is trained on."""
        rows, scored, config = table.rewards, table.scored, self._config
        parts = []
        if not len(rows.length):
            row = scored.metrics()
            mean, correct = row.get("reward/mean", 0.0), row["reward/accuracy"]
            rewards = f"mean reward {mean:.4g}, {correct:.1%} of responses correct"
            remedy = "change the prompts, the rewards or rollout.samples_per_prompt"
            parts.append(f"dynamic sampling kept no group, since none has two rewards ({rewards}): {remedy}")
        elif config.algorithm.mask_truncated and rows.truncated.any():
            limits = f"rollout.max_tokens = {config.rollout.max_tokens}"
            limits += "" if config.env is None else " or a limit of the environment"
            masked = f"algorithm.mask_truncated leaves out {rows.truncated.mean():.0%} of the responses"
            parts.append(f"{masked}, which {limits} has cut off")
        if scored.aborted.any():
            parts.append(f"the environments of {scored.aborted.mean():.0%} of the responses failed")
        return "; ".join(parts) or "the responses have no token that the policy drew"

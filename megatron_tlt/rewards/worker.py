"""The inside of a reward worker: a process that judges one sample at a time, without MPI and torch.

This module imports no numpy: a worker limits numpy's threads first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_tlt.workers.descendants import sessions_ended
from megatron_tlt.workers.process import end_if_full, forks_ended

if TYPE_CHECKING:
    from megatron_tlt.rewards.base import Scorer
    from megatron_tlt.types import Prompt, RewardResult, Sample


class RewardHost:
    """The reward functions in one process."""

    def __init__(self, section_json: str):
        """`section_json`: the `RewardSection`. Raises TltError for functions that cannot be loaded."""
        from megatron_tlt.config.data import RewardSection
        from megatron_tlt.rewards.build import build_scorers

        self._section = RewardSection.model_validate_json(section_json)
        self._scorers = [replace(named, scorer=_guarded(named.scorer)) for named in build_scorers(self._section)]

    def answer(self, job: tuple[Prompt, Sample]) -> RewardResult:
        """The result of one sample; see `base.judge`. Ends this process where a function has left it without memory."""
        from megatron_tlt.rewards.base import judge

        result = judge(self._scorers, self._section.failure_value, *job)
        end_if_full(result.failure or "")
        return result


def _guarded(scorer: Scorer) -> Scorer:
    def score(prompt: Prompt, sample: Sample) -> object:
        with sessions_ended(), forks_ended():
            return scorer(prompt, sample)

    return score

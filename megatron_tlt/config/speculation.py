"""Speculative decoding in the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from megatron_tlt.config.base import Section
from megatron_tlt.errors import ConfigProblem


class SuffixSection(Section):
    """The suffix drafter: what the siblings of an answer, and earlier answers to its prompt, say next."""

    depth: PositiveInt = Field(default=16, le=64)
    """Longest context, in tokens, that is matched."""
    history_epochs: int = Field(default=2, ge=0, le=8)
    """Earlier visits of a prompt whose answers are kept; 0: siblings in flight only."""
    history_answers: PositiveInt = 8
    """Most answers kept of one prompt, best scores first."""
    history_mib: PositiveInt = 256
    """Memory of one rank for kept answers (the questions seen longest ago go first), and as much again for tries."""


class BanditSection(Section):
    """TLT's bucketed epsilon-greedy bandit (`selector: beg_mab`)."""

    arms: tuple[str, ...] = ("6_2_12", "6_1_7", "4_1_5", "3_1_4", "2_1_3", "1_1_2", "0_1_1")
    """Strategies as DRAFT-LENGTH_TOPK_TOKENS-TO-VERIFY (the request's last token included); 0_1_1 is plain decoding."""
    thresholds: tuple[PositiveInt, ...] = (1, 3, 9, 17)
    """Running requests at which the buckets begin."""
    epsilon: float = Field(default=0.1, ge=0, le=1)
    """Share of exploring steps at the start."""
    epsilon_decay: float = Field(default=0.995, gt=0, le=1)
    """Factor on epsilon after each step of a bucket."""
    window: PositiveInt = 50
    """Measurements of an arm that its median is taken over."""


class SpeculationSection(Section):
    """Speculative decoding: which drafter, and when it pays. Answers never depend on it."""

    drafter: Literal["none", "suffix", "eagle", "hybrid"] = "none"
    """none: plain decoding. suffix: sibling and earlier answers, nothing to train. eagle: a trained one-layer drafter.
    hybrid: the better of the two for each request."""
    drafter_path: str | None = None
    """Directory of the eagle drafter's weights (`megatron-tlt drafter train` makes one)."""
    allow_other_policy: bool = False
    """Accept a drafter that was made for another policy than model.path, as its fingerprint of embedding and tokenizer
    says. Answers stay the same; drafts are accepted less."""
    selector: Literal["fixed", "beg_mab", "cost_aware"] = "cost_aware"
    """fixed: always draft_len and topk. beg_mab: a bandit picks among strategies by running requests. cost_aware: each
    request's draft length from estimated cumulative acceptance and measured step costs."""
    draft_len: PositiveInt = Field(default=11, le=32)
    """Most tokens drafted in a row."""
    topk: PositiveInt = Field(default=1, le=4)
    """Candidates at each drafted position: 1 is a chain, more make a small tree."""
    window: PositiveInt = 256
    """Most positions that the eagle drafter catches up with when it starts late; it sees nothing before them."""
    min_cumulative_acceptance: NonNegativeFloat = Field(default=0.0, lt=1)
    """Drafts stop where a token is less likely than this to be emitted (not for cost_aware, which finds its own)."""
    suffix: SuffixSection = SuffixSection()
    """The suffix drafter."""
    bandit: BanditSection = BanditSection()
    """The bandit."""

    @property
    def uses_eagle(self) -> bool:
        """Whether a trained drafter is part of it."""
        return self.drafter in ("eagle", "hybrid")

    @property
    def uses_suffix(self) -> bool:
        """Whether the suffix drafter is part of it."""
        return self.drafter in ("suffix", "hybrid")


def check_speculation(section: SpeculationSection, has_drafter: bool = False) -> Iterator[ConfigProblem]:
    """What does not go together; arms are checked where they are parsed (`rollout.spec.strategy`).

    `has_drafter`: weights come from elsewhere than `drafter_path`.
    """
    at = "rollout.speculation"
    if section.uses_eagle and section.drafter_path is None and not has_drafter:
        allowed = f"drafter {section.drafter!r} needs a directory made by megatron-tlt drafter"
        yield ConfigProblem(f"{at}.drafter_path", None, allowed)

"""Speculative decoding in the rollout engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_tlt.config.base import OnDisk, Section
from megatron_tlt.config.drafter_kinds import DRAFTERS, DrafterFacts, DrafterName, draft_vocabulary_in
from megatron_tlt.types import DraftedBy

_LARGE_VOCABULARY = 16384  # tokens, above which a new drafter drafts the most frequent ones only
_REDUCED = 4096  # tokens: 100.00 % of SmolLM2's responses to sums and word problems


class SuffixSection(Section):
    """The suffix drafter: proposes what followed the same context in other responses to the prompt, in flight or of its
    last epochs."""

    history_mib: PositiveInt = 256
    """Memory of one rank for kept responses (the prompts seen longest ago go first), and as much again for tries."""


class BanditSection(Section):
    """TLT's bucketed epsilon-greedy bandit (`selector: beg_mab`)."""

    arms: tuple[Annotated[int, Field(ge=0, le=32)], ...] = (6, 4, 3, 2, 1, 0)
    """Draft lengths to choose from; 0 is plain decoding."""
    thresholds: tuple[PositiveInt, ...] = (1, 3, 9, 17)
    """Running requests at which the buckets begin."""
    epsilon: float = Field(default=0.1, ge=0, le=1)
    """Share of exploring steps behind a weight sync; it halves with every 138 steps of a bucket until the next one."""


class SpeculationSection(Section):
    """Speculative decoding: which drafter, and when it pays. Responses depend on it only by rounding, and
    not at all where forwards are batch-invariant: on CPUs with the native decoder (docs/design/numerics.md)."""

    drafter: DrafterName = "none"
    """none: plain decoding. suffix: what sibling and earlier responses said, nothing to train. The others are trained
    drafters. eagle (EAGLE-1 in TLT's form) is one layer that reads the policy's last hidden state and drafts through
    its LM head. eagle3 (EAGLE-3) is one layer that reads three layers, four times the bytes of hidden states, and has
    an LM head of its own; serving engines have it for policies of every family. dspark (DSpark; DFlash and DFlash 2
    as others publish them) fills a block of tokens in one forward through the policy's LM head; its draft costs the
    same whatever its length, and it needs far more training than eagle: begin with a published one."""
    drafter_path: Annotated[str | None, OnDisk("drafter", is_read=lambda s: s.trained)] = None
    """Directory of the trained drafter's weights, of this kind (`megatron-tlt drafter train` makes one), or a name on
    the Hugging Face hub, as in model.path; null: a new one, which starts from the policy and needs training."""
    layers: tuple[NonNegativeInt, ...] | None = None
    """eagle3 and dspark: the policy layers, from 0, whose outputs it reads, three of eagle3; null: those of
    drafter_path, or 1, L/2 - 1, L - 4 of L layers, for dspark three evenly spaced from 1 to L - 3."""
    block_size: Annotated[int, Field(ge=2, le=32)] | None = None
    """dspark: tokens that it drafts at once; null: as in drafter_path, or 8. draft_len beyond it has no effect."""
    block_layers: PositiveInt | None = None
    """dspark: its layers; null: as in drafter_path, or 2."""
    draft_vocab_size: PositiveInt | None = None
    """A trained drafter drafts only so many of the policy's tokens, those most frequent in the responses that it is
    first trained on; null: as in drafter_path, or, of a new drafter, 4096 tokens where the policy has more than 16384,
    else all."""
    allow_other_policy: bool = False
    """Accept a drafter that was made for another policy than model.path, as its fingerprint of the embedding says.
    Fewer drafts are accepted; responses are as with any drafter."""
    selector: Literal["fixed", "beg_mab", "cost_model"] = "cost_model"
    """fixed: always draft_len. beg_mab: a bandit picks among draft lengths by running requests. cost_model: the
    draft length with the most expected tokens per second, by measured step costs and acceptance rates; 0 where plain
    decoding is faster. Its trials cost 1 to 2 % of the time, more in the first rollouts."""
    draft_len: PositiveInt = Field(default=11, le=32)
    """Most tokens drafted in a row. beg_mab takes those of bandit.arms: less than the largest of them is refused."""
    suffix: SuffixSection = SuffixSection()
    """The suffix drafter."""
    bandit: BanditSection = BanditSection()
    """The bandit."""

    @property
    def trained(self) -> DrafterFacts | None:
        """The kind of the trained drafter, in its sizes here; None where nothing is trained."""
        facts = DRAFTERS.get(self.drafter)
        return None if facts is None else facts.sized(self)

    def draft_tokens(self, vocab_size: int) -> int:
        """Tokens that a new drafter of a policy of `vocab_size` tokens drafts."""
        return self.draft_vocab_size or (_REDUCED if vocab_size > _LARGE_VOCABULARY else vocab_size)

    def drafted_tokens(self, vocab_size: int) -> int:
        """Tokens that the configured drafter drafts; all where `drafter_path` says no number or is not here."""
        if self.drafter_path is None:
            return self.draft_tokens(vocab_size)
        return self.draft_vocab_size or draft_vocabulary_in(self.drafter_path) or vocab_size

    @property
    def state_parts(self) -> int:
        """Width of a token's state in hidden sizes, as the trained drafter reads it; without one the final state."""
        return 1 if self.trained is None else self.trained.state_parts

    @property
    def drafts_by(self) -> DraftedBy:
        """The source of drafts, for every kind of trained drafter."""
        if self.trained is None:
            return "suffix" if self.drafter == "suffix" else "none"
        return "trained"

    @property
    def rows_each(self) -> int:
        """Most rows that a request has in a forward: its last token and its drafted tokens."""
        return 1 + self.longest_draft

    @property
    def longest_draft(self) -> int:
        """Most tokens that the drafter drafts in a row, by any strategy of the selector."""
        if self.drafter == "none":
            return 0
        if self.selector != "beg_mab":
            return self.draft_len
        return max(self.bandit.arms, default=0)

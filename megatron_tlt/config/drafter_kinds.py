"""The kinds of trained drafters: their names, and the facts that a configuration needs of each. Torch-free.

`DRAFTERS` is the one table of names. `drafters/` has the object that builds, trains, reads and exports a kind.

Legend: H hidden size, V vocabulary, Vd the drafter's. A kind whose sizes follow other formulas overrides the methods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_tlt.config.block_drafters import (
    BLOCK_LAYERS,
    BLOCK_SIZE,
    BLOCK_TAPS,
    CONV_GROUP,
    NUM_CANDIDATES,
    block_shape_in,
    markov_rank,
)
from megatron_tlt.config.model import ArchitectureConfig

DrafterName = Literal["none", "suffix", "eagle", "eagle3", "dspark"]


def vllm_layers_problem(family: str) -> str | None:
    """Why vLLM runs no drafter that reads layers of a policy of this family; None where it does. Of those with experts
    its Qwen3-MoE alone gives their outputs.
    """
    return f"vLLM gives no layer's output of a {family} policy" if family in ("qwen2_moe", "mixtral") else None


def draft_vocabulary_in(directory: str) -> int | None:
    """Tokens that the drafter in `directory` drafts; None where its config.json says no number or cannot be read."""
    try:
        size = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")).get("draft_vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int and size > 0 else None


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """Facts of a kind of trained drafter that planning, checks and simulation need."""

    name: str
    layers_read: int  # policy layers whose outputs it reads beside the final hidden state
    has_own_head: bool  # its LM head is its own, of Vd tokens, and trained; else rows of the policy's
    online_draft_steps: int  # drafted positions of a training micro-step, where the configuration has auto
    # Kept for backward beyond eagle's layer: multiples of H, a token and drafted position; fewer of the first position.
    more_kept: int = 0
    less_first: int = 0
    cached_layers: int = 1  # its layers with keys and values in the cache
    settings: tuple[str, ...] = ()  # of `rollout.speculation`, that not all kinds have

    def sized(self, section: Any) -> DrafterFacts:
        """The facts with the sizes of a `SpeculationSection`, or of the directory that it names; by default all are
        of one size.
        """
        return self

    @property
    def state_parts(self) -> int:
        """Width of a token's state in multiples of H: the final one, behind those of the layers that it reads."""
        return self.layers_read + 1

    def parameters(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Its parameters: one layer of the policy's sizes and `fc` (2H x H). With layers read, `fc` reads those, and
        queries, keys and values 2H; an LM head of its own (`draft_vocab_size` tokens; None: V) comes on top.
        """
        h, heads = shape.hidden_size, shape.num_heads + shape.num_kv_heads
        layer = 2 * h * shape.head_dim * heads + 2 * h + 3 * h * shape.intermediate_size
        count = layer + (self.layers_read or 2) * h * h
        if self.layers_read:
            count += h * shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        return count + self.head_elements(shape, draft_vocab_size)

    def head_elements(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of its own LM head; 0 without one."""
        return self.has_own_head * (draft_vocab_size or shape.vocab_size) * shape.hidden_size

    def largest_parameter(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of its largest tensor: `fc`, one of the MLP's or its LM head."""
        h, head = shape.hidden_size, self.head_elements(shape, draft_vocab_size)
        return max((self.layers_read or 2) * h * h, h * shape.intermediate_size, head)

    def kept_elements(self, shape: ArchitectureConfig, steps: int) -> int:
        """Elements a token that a training micro-step of `steps` positions keeps for backward, without the loss."""
        heads = (3 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        layer = 10 * shape.hidden_size + heads + 3 * shape.intermediate_size
        return layer * steps + (self.more_kept * steps - self.less_first) * shape.hidden_size

    def draft_steps(self, given: int | Literal["auto"]) -> int:
        """Drafted positions of a training micro-step, of which a configuration has `given`."""
        return self.online_draft_steps if given == "auto" else given

    def passes(self, length: int) -> int:
        """Forward passes of a draft of `length` tokens: one a position."""
        return length

    @property
    def rows(self) -> int:
        """Rows of a pass for each request."""
        return 1

    def read_elements(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of weights that a pass reads: layers, `fc` and the rows of an LM head."""
        own = self.parameters(shape, draft_vocab_size) - self.head_elements(shape, draft_vocab_size)
        return own + (draft_vocab_size or shape.vocab_size) * shape.hidden_size

    def token_elements(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of weights that each drafted token reads beside its pass."""
        return 0


@dataclass(frozen=True, slots=True)
class BlockFacts(DrafterFacts):
    """Facts of a block drafter: `cached_layers` layers, which fill a block in one pass."""

    block_size: int = BLOCK_SIZE
    rank: int | None = None  # of the Markov head or DFlash 2's selector; None: `markov_rank` of the policy
    has_selector: bool = False  # DFlash 2's, with its convolutions

    def sized(self, section: Any) -> BlockFacts:
        """In the sizes of this section. A drafter of the hub, whose files are not here yet, counts as a new one."""
        given = section.drafter_path
        found = None if given is None else block_shape_in(given)
        if found is None:
            taps = BLOCK_TAPS if section.layers is None else len(section.layers)
            layers, block = section.block_layers or BLOCK_LAYERS, section.block_size or BLOCK_SIZE
            return replace(self, layers_read=taps, cached_layers=layers, block_size=block)
        return replace(
            self,
            layers_read=len(found.aux_layers or section.layers or ()),
            cached_layers=found.layers,
            block_size=found.block_size,
            rank=found.markov_rank or found.selector_rank,
            has_selector=bool(found.selector_rank),
        )

    def _rank(self, shape: ArchitectureConfig) -> int:
        return markov_rank(shape.hidden_size) if self.rank is None else self.rank

    def parameters(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Layers of the policy's sizes, `fc` of all layers that are read, two tables of Markov head or selector, with
        a selector two convolutions a layer.
        """
        h, heads = shape.hidden_size, shape.num_heads + shape.num_kv_heads
        layer = 2 * h * shape.head_dim * heads + 2 * h + 3 * h * shape.intermediate_size
        tables = (shape.vocab_size + (draft_vocab_size or shape.vocab_size)) * self._rank(shape)
        if self.has_selector:
            layer += 8 * h + 8 * h * h // CONV_GROUP
            tables += h * self._rank(shape)
        return self.cached_layers * layer + self.layers_read * h * h + tables

    def largest_parameter(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of its largest tensor: `fc`, one of the MLP's or the Markov head's table of all tokens."""
        h = shape.hidden_size
        return max(self.layers_read * h * h, h * shape.intermediate_size, shape.vocab_size * self._rank(shape))

    def kept_elements(self, shape: ArchitectureConfig, steps: int) -> int:
        """Elements a token that a micro-step keeps for backward: about as many rows of blocks as tokens, in every
        layer, and the keys and values of the tokens' features; whatever `steps`.
        """
        h, heads, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = 10 * h + 19 * heads // 2 + 12 * kv + 3 * shape.intermediate_size  # queries and keys are normed in fp32
        rows += self.has_selector * 14 * h  # kernels, and the slots before
        return self.cached_layers * rows + 8 * h

    def passes(self, length: int) -> int:
        """One, whatever the length: the whole block is filled."""
        return min(1, length)

    @property
    def rows(self) -> int:
        return self.block_size

    def read_elements(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Weights without the Markov head's tables, of which a draft reads single rows, and the LM head."""
        tokens = draft_vocab_size or shape.vocab_size
        tables = (shape.vocab_size + tokens) * self._rank(shape)
        return self.parameters(shape, draft_vocab_size) - tables + tokens * shape.hidden_size

    def token_elements(self, shape: ArchitectureConfig, draft_vocab_size: int | None) -> int:
        """Elements of the bias of all tokens, or of the selector's candidates."""
        biased = NUM_CANDIDATES if self.has_selector else draft_vocab_size or shape.vocab_size
        return biased * self._rank(shape)


_BLOCK_SETTINGS = "layers", "block_size", "block_layers"
DRAFTERS = {
    facts.name: facts
    for facts in (
        DrafterFacts("eagle", 0, False, online_draft_steps=1),
        # Three norms with their inputs in fp32, and the layer's input of the position before.
        DrafterFacts("eagle3", 3, True, online_draft_steps=3, more_kept=21, less_first=17, settings=("layers",)),
        BlockFacts("dspark", BLOCK_TAPS, False, BLOCK_SIZE, cached_layers=BLOCK_LAYERS, settings=_BLOCK_SETTINGS),
    )
}
SETTINGS = tuple(dict.fromkeys(name for facts in DRAFTERS.values() for name in facts.settings))
TRAINED_ONLY = ("drafter_path", "draft_vocab_size", *SETTINGS)  # what only a trained drafter reads

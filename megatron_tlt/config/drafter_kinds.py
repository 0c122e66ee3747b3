"""The kinds of trained drafters: their names, and the facts that a configuration needs of each. Torch-free.

`DRAFTERS` is the one table of names. `drafter/kinds/` has the object that builds, trains, reads and exports a kind.

Legend: H hidden size, V vocabulary, Vd the drafter's. A kind whose sizes follow other formulas overrides the methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_tlt.config.model import ArchitectureConfig

DrafterName = Literal["none", "suffix", "eagle", "eagle3"]


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

    def passes(self, length: int) -> int:
        """Forward passes of a draft of `length` tokens: one a position."""
        return length


DRAFTERS = {
    facts.name: facts
    for facts in (
        DrafterFacts("eagle", 0, False, online_draft_steps=1),
        # Three norms with their inputs in fp32, and the layer's input of the position before.
        DrafterFacts("eagle3", 3, True, online_draft_steps=3, more_kept=21, less_first=17),
    )
}

"""Shapes of block drafters: the tensors that they train, save and load, under the names of public files.

Embedding and LM head are the policy's at every moment: a file's frozen copies of them are not kept.

Legend: H hidden size of the policy, V vocabulary, Vd the drafter's, L policy layers, n layers that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from megatron_tlt.config.block_drafters import BLOCK_LAYERS, BLOCK_SIZE, BLOCK_TAPS, BlockShape, markov_rank
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import MOST_AUX_LAYERS
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.eagle.config import checked_size

_AT = "rollout.speculation"


@dataclass(frozen=True, slots=True)
class BlockConfig(DrafterConfig):
    """DSpark (2607.05147); with rank 0 and the other alignment DFlash (2602.06036). `layer` is one of its layers."""

    kind = "dspark"

    block_layers: int = BLOCK_LAYERS
    block_size: int = BLOCK_SIZE  # B, slots of a block: the anchor's token, then masks
    markov_rank: int = 0  # r; 0: no Markov head
    mask_token_id: int = 0  # the row of the policy's embedding that the other slots begin with
    sample_from_anchor: bool = True  # slot k gives the token behind slot k; else slot k gives its own, and slot 0 none

    @classmethod
    def of(
        cls,
        policy: ModelConfig,
        shape: BlockShape,
        draft_vocab_size: int | None = None,
        layer: ModelConfig | None = None,
    ) -> Self:
        """By default over the whole vocabulary, with layers of the policy's sizes in the form of Qwen3, the only one
        that serving engines have. Raises ConfigError for layers, a mask or sizes that the policy does not have.
        """
        last = policy.num_layers - 2  # as of eagle3: engines collect a layer's input
        ids, rising = shape.aux_layers, all(a < b for a, b in pairwise(shape.aux_layers))
        if not ids or not rising or ids[0] < 0 or ids[-1] > last or len(ids) > MOST_AUX_LAYERS:
            allowed = f"must be ascending layers of 0 .. {last}, {MOST_AUX_LAYERS} at most"
            raise ConfigError.of(f"{_AT}.layers", list(ids), allowed)
        if not 0 <= shape.mask_token_id < policy.vocab_size:
            allowed = f"must be a row of the policy's embedding, 0 .. {policy.vocab_size - 1}"
            raise ConfigError.of("mask_token_id", shape.mask_token_id, allowed)
        if shape.block_size < 2 or shape.layers < 1 or shape.markov_rank < 0:
            raise ConfigError.of("block_size", shape.block_size, "must be 2 or more, in 1 layer or more, of rank >= 0")
        size = checked_size(draft_vocab_size, policy)
        qwen3 = replace(policy.dense_sibling, family="qwen3", num_layers=1, qkv_bias=False, qk_norm=True)
        sizes = shape.layers, shape.block_size, shape.markov_rank, shape.mask_token_id, shape.sample_from_anchor
        return cls(policy, replace(layer or qwen3, num_layers=1), size, ids, *sizes)

    @classmethod
    def fresh(
        cls,
        policy: ModelConfig,
        layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
        block_layers: int | None = None,
        block_size: int | None = None,
    ) -> Self:
        """A new one. Its mask is the last row of the policy's embedding: padding in large vocabularies, or a token."""
        chosen = spread_layers(policy.num_layers, BLOCK_TAPS) if layers is None else layers
        sizes = block_layers or BLOCK_LAYERS, chosen, block_size or BLOCK_SIZE, markov_rank(policy.hidden_size)
        return cls.of(policy, BlockShape(*sizes, policy.vocab_size - 1, True), draft_vocab_size)

    @property
    def num_drafted(self) -> int:
        """Tokens that a block gives."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot that gives the first token."""
        return 0 if self.sample_from_anchor else 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names of DeepSpec's files."""
        h = self.policy.hidden_size
        out: dict[str, tuple[int, ...]] = {"fc.weight": (h, len(self.aux_layers) * h), "hidden_norm.weight": (h,)}
        for j in range(self.block_layers):
            out |= {f"layers.{j}.{name}": shape for name, shape in self.layer.layer_shapes(0).items()}
        out["norm.weight"] = (h,)
        if self.markov_rank:
            out["markov_head.markov_w1.weight"] = (self.policy.vocab_size, self.markov_rank)
            out["markov_head.markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        return out | self.vocabulary_shapes()


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, evenly from 1 to L - 3 as in published drafters; of short policies from 0 to L - 2. Raises
    ConfigError for a policy that has too few.
    """
    if num_layers - 1 < count:
        allowed = f"a drafter of kind dspark reads {count} layers below the last: {count + 1} or more"
        raise ConfigError.of("num_hidden_layers", num_layers, allowed)
    low, high = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 2)
    return tuple(low + round(i * (high - low) / max(1, count - 1)) for i in range(count))

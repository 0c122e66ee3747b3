"""Shapes of block drafters: the tensors that they train, save and load, under the names of public files.

Embedding and LM head are the policy's at every moment: a file's frozen copies of them are not kept.

Legend: H hidden size of the policy, V vocabulary, Vd the drafter's, L policy layers, n layers that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from megatron_tlt.config.block_drafters import (
    BLOCK_LAYERS,
    BLOCK_SIZE,
    BLOCK_TAPS,
    CONV_GROUP,
    BlockShape,
    markov_rank,
)
from megatron_tlt.drafters.eagle.config import checked_size
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import MOST_AUX_LAYERS
from megatron_tlt.models.hf.config import ModelConfig

_AT = "rollout.speculation"


@dataclass(frozen=True, slots=True)
class BlockConfig(DrafterConfig):
    """DSpark (2607.05147); with rank 0 and the other alignment DFlash (2602.06036), with a selector then DFlash 2.

    `layer` is one of its layers.
    """

    kind = "dspark"

    block_layers: int = BLOCK_LAYERS
    block_size: int = BLOCK_SIZE  # B, slots of a block: the anchor's token, then masks
    markov_rank: int = 0  # r; 0: no Markov head
    mask_token_id: int = 0  # the row of the policy's embedding that the other slots begin with
    sample_from_anchor: bool = True  # slot k gives the token behind slot k; else slot k gives its own, and slot 0 none
    selector_rank: int = 0  # of DFlash 2's candidate selector, which comes with convolutions; 0: neither
    windows: tuple[int, ...] = ()  # of each layer, positions that a slot attends to; 0: all; (): all in every layer

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
        if any(0 < window <= shape.block_size for window in shape.windows):
            raise ConfigError.of("sliding_window", list(shape.windows), f"must be above {shape.block_size}, the block")
        size = checked_size(draft_vocab_size, policy)
        is_other = bool(shape.markov_rank) or shape.sample_from_anchor or size != policy.vocab_size
        if shape.selector_rank and (is_other or policy.hidden_size % CONV_GROUP):
            allowed = f"needs DFlash's alignment, no Markov head, the whole vocabulary, channels in {CONV_GROUP}s"
            raise ConfigError.of("selector_rank", shape.selector_rank, allowed)
        qwen3 = replace(policy.dense_sibling, family="qwen3", num_layers=1, qkv_bias=False, qk_norm=True)
        sizes = shape.layers, shape.block_size, shape.markov_rank, shape.mask_token_id, shape.sample_from_anchor
        more = shape.selector_rank, shape.windows
        return cls(policy, replace(layer or qwen3, num_layers=1), size, ids, *sizes, *more)

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

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """`windows` of every layer."""
        return self.windows or (0,) * self.block_layers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names of DeepSpec's files, and of z-lab's."""
        h = self.policy.hidden_size
        out: dict[str, tuple[int, ...]] = {"fc.weight": (h, len(self.aux_layers) * h), "hidden_norm.weight": (h,)}
        for j in range(self.block_layers):
            out |= {f"layers.{j}.{name}": shape for name, shape in self.layer.layer_shapes(0).items()}
            for conv in ("attention_conv", "mlp_conv") if self.selector_rank else ():
                out[f"layers.{j}.{conv}.base_kernel"] = (2, 2, h)
                out[f"layers.{j}.{conv}.kernel_projection.weight"] = (4 * h // CONV_GROUP, h)
        out["norm.weight"] = (h,)
        if self.markov_rank:
            out["markov_head.markov_w1.weight"] = (self.policy.vocab_size, self.markov_rank)
            out["markov_head.markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        if self.selector_rank:
            codebook = self.policy.vocab_size, self.selector_rank
            out["candidate_selector.predecessor_codebook"] = out["candidate_selector.successor_codebook"] = codebook
            out["candidate_selector.hidden_projection.weight"] = (self.selector_rank, h)
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

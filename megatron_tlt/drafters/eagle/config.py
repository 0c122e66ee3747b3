"""Shapes of EAGLE drafters: their one layer, and the tensors that they train, save and load.

| kind | reads of the policy | its layer | its LM head |
|---|---|---|---|
| eagle | the final hidden state, H | one of the policy's dense sibling, without input norm | Vd rows of the policy's |
| eagle3 | outputs of three layers, 3 H | Llama's, over 2 H inputs, whatever the policy is | its own, of Vd tokens |

Legend: H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import ModelConfig


@dataclass(frozen=True, slots=True)
class EagleConfig(DrafterConfig):
    """TLT's form of EAGLE: no norm before the layer's attention, none behind it."""

    kind = "eagle"

    @classmethod
    def of(cls, policy: ModelConfig, draft_vocab_size: int | None = None) -> Self:
        """The drafter of `policy`, by default over its whole vocabulary. Raises ConfigError for a larger one."""
        layer = replace(policy.dense_sibling, num_layers=1)
        return cls(policy, layer, checked_size(draft_vocab_size, policy))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """`fc` joins [embedding of the token at s ; hidden state of s - 1], in this order."""
        h, layer = self.policy.hidden_size, self.layer.layer_shapes(0)
        kept = {f"layer.{name}": s for name, s in layer.items() if name != "input_layernorm.weight"}
        return {"fc.weight": (h, 2 * h), **kept, **self.vocabulary_shapes()}


@dataclass(frozen=True, slots=True)
class Eagle3Config(DrafterConfig):
    """EAGLE-3."""

    kind = "eagle3"

    norm_before_residual: bool = False  # the layer's residual stream begins behind `hidden_norm`

    @classmethod
    def of(
        cls,
        policy: ModelConfig,
        layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
        layer: ModelConfig | None = None,
        norm_before_residual: bool = False,
    ) -> Self:
        """By default the engines' own choice of layers, the whole vocabulary, a layer of the policy's sizes.

        Raises ConfigError for layers that the engines cannot collect: they collect a layer's input, so the
        last one's output is out of reach.
        """
        chosen = default_layers(policy.num_layers) if layers is None else tuple(layers)
        last, at = policy.num_layers - 2, "rollout.speculation"
        rising = all(a < b for a, b in pairwise(chosen))
        if len(chosen) != 3 or not rising or chosen[0] < 0 or chosen[2] > last:
            raise ConfigError.of(f"{at}.layers", list(chosen), f"must be three ascending layers of 0 .. {last}")
        size = checked_size(draft_vocab_size, policy)
        own = policy.dense_sibling if layer is None else layer
        own = replace(own, family="llama", num_layers=1, qkv_bias=False, qk_norm=False)
        return cls(policy, own, size, chosen, norm_before_residual)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names that serving engines read."""
        h, layer = self.policy.hidden_size, self.layer.layer_shapes(0)
        inputs = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}
        wide = {name: (s[0], 2 * h) if name in inputs else s for name, s in layer.items()}
        out: dict[str, tuple[int, ...]] = {"fc.weight": (h, 3 * h)}
        out |= {f"midlayer.{name}": s for name, s in (wide | {"hidden_norm.weight": (h,)}).items()}
        out |= {"norm.weight": (h,), "lm_head.weight": (self.draft_vocab_size, h)}
        return out | self.vocabulary_shapes()


def checked_size(draft_vocab_size: int | None, policy: ModelConfig) -> int:
    """The size of a drafter's vocabulary, by default the policy's. Raises ConfigError for a larger one."""
    size = policy.vocab_size if draft_vocab_size is None else draft_vocab_size
    if not 1 <= size <= policy.vocab_size:
        allowed = f"must be 1 .. {policy.vocab_size}"
        raise ConfigError.of("rollout.speculation.draft_vocab_size", size, allowed)
    return size


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The engines' default for policies of seven layers or more; shorter ones get a spread of the layers in reach."""
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    if num_layers < 4:
        raise ConfigError.of("num_hidden_layers", num_layers, "EAGLE-3 reads three layers below the last: 4 or more")
    return 0, num_layers // 2 - 1, num_layers - 2

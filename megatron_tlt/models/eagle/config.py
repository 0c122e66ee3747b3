"""What a drafter of a policy is: its one layer, the tensors that it trains, saves and loads.

| kind | reads of the policy | its layer | its LM head |
|---|---|---|---|
| eagle | the final hidden state, H | one of the policy's dense sibling, without input norm | the policy's |
| eagle3 | outputs of three layers, 3 H | Llama's, over 2 H inputs, whatever the policy is | its own, of Vd tokens |

Legend: H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from megatron_tlt.errors import CheckpointError, ConfigError, shortened
from megatron_tlt.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DrafterConfig(ABC):
    """A drafter of `policy`, of any kind. Subclasses are built with `of`, which checks."""

    kind: ClassVar[str]  # a name of `config.drafter_kinds.DRAFTERS`

    policy: ModelConfig
    layer: ModelConfig  # of its one layer: heads, width of the MLP, rotary embedding, norms' epsilon
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()  # policy layers, from 0, whose outputs (residual stream) are read; ascending

    @property
    def reduced(self) -> bool:
        """Whether the drafter's vocabulary is a part of the policy's (`d2t`, `t2d`)."""
        return self.draft_vocab_size != self.policy.vocab_size

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor; never the policy's embedding or LM head."""

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError that names every missing, unexpected, misshapen tensor, or a wrong `d2t`."""
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in given.items()})
        if self.reduced:
            _refuse(_vocabulary_problems(given["d2t"], given["t2d"]))

    def check_shapes(self, given: Mapping[str, tuple[int, ...]]) -> None:
        """As `check`, from the shapes alone."""
        wanted = self.shapes()
        problems = [f"{name} is missing" for name in wanted if name not in given]
        problems += [f"{name} is not part of the drafter" for name in given if name not in wanted]
        problems += [
            f"{name} has shape {given[name]}, the policy needs {shape}"
            for name, shape in wanted.items()
            if name in given and given[name] != shape
        ]
        _refuse(problems)


@dataclass(frozen=True, slots=True)
class EagleConfig(DrafterConfig):
    """TLT's form of EAGLE: no norm before the layer's attention, none behind it."""

    kind = "eagle"

    @classmethod
    def of(cls, policy: ModelConfig) -> Self:
        """The drafter of `policy`."""
        return cls(policy, replace(policy.dense_sibling, num_layers=1), policy.vocab_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """`fc` joins [embedding of the token at s ; hidden state of s - 1], in this order."""
        h, layer = self.policy.hidden_size, self.layer.layer_shapes(0)
        kept = {f"layer.{name}": s for name, s in layer.items() if name != "input_layernorm.weight"}
        return {"fc.weight": (h, 2 * h), **kept}


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
        size = policy.vocab_size if draft_vocab_size is None else draft_vocab_size
        if not 1 <= size <= policy.vocab_size:
            raise ConfigError.of(f"{at}.draft_vocab_size", size, f"must be 1 .. {policy.vocab_size}")
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
        if self.reduced:
            out |= {"d2t": (self.draft_vocab_size,), "t2d": (self.policy.vocab_size,)}
        return out


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The engines' default for policies of seven layers or more; shorter ones get a spread of what can be collected."""
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    if num_layers < 4:
        raise ConfigError.of(
            "num_hidden_layers", num_layers, "EAGLE-3 reads three layers below the last: 4 or more"
        )
    return 0, num_layers // 2 - 1, num_layers - 2


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"the drafter does not fit the policy: {shortened(problems, separator='; ')}")


def _vocabulary_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t and t2d are {d2t.dtype} and {t2d.dtype}, they must be int64 and bool"]
    known = t2d.nonzero().flatten()
    if not torch.equal(torch.arange(len(d2t)) + d2t.cpu(), known.cpu()):
        return ["d2t[i] + i does not name the tokens that t2d marks, in ascending order"]
    return []

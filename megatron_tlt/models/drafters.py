"""Interfaces of a drafter of any kind: its shape, its training batches, its weights and arithmetic in training.

Legend: T packed tokens of B sequences, N bases, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_tlt.errors import CheckpointError, shortened
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

    def vocabulary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of a reduced vocabulary: d2t[i] + i is the policy's id of the drafter's token i, t2d marks the ids."""
        return {"d2t": (self.draft_vocab_size,), "t2d": (self.policy.vocab_size,)} if self.reduced else {}

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


@dataclass(slots=True)
class DraftBatch:
    """B sequences of L_b tokens, packed, and where drafts begin in them. Places count from a sequence's first token.

    A *base* is a place s at which a draft may begin: s = first[b] .. L_b - 2. The row of unrolled step j at base s is
    at place s + j; it exists while the policy drew all of the tokens s + 1 .. s + j + 1. (With given tokens behind the
    first drawn one, some bases have no row at all.)
    """

    tokens: Tensor  # [T] int64
    hidden: Tensor  # [T, H], the policy's hidden state after its final norm at the same positions
    starts: list[int]  # [B + 1]
    first: list[int]  # [B], first base of each sequence, >= 1
    offsets: list[int]  # [B], position of each sequence's first token: > 0 for windows of long sequences
    drawn: np.ndarray  # bool [T], on the host: tokens that the policy drew; the others are context


class DraftLayout(Protocol):
    """Index tensors of a `DraftBatch`: where its drafts begin, and which rows of the T they read."""

    positions: Tensor  # int64 [T], in the whole sequence
    bases: Tensor  # int64 [N], rows of the T

    def rows(self, step: int) -> Tensor:
        """Rows [N] of the T that step `step` reads at each base; beyond the draft's end its last row."""

    def valid(self, step: int) -> Tensor:
        """Bool [N]: bases that have step `step`."""


class DrafterModel(nn.Module, ABC):
    """A drafter's weights and arithmetic in training.

    The policy's embedding and LM head are passed at every call. All tensors (`DrafterConfig.shapes`) are its
    `state_dict`; its parameters are trained.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config

    head_parameters: ClassVar[tuple[str, ...]] = ()  # those that begin as rows of the policy's LM head

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Random weights."""

    def start_fresh(self, seed: int, head: Tensor, counts: Tensor) -> None:
        """`initialise`, and `choose_vocabulary` of what responses have."""
        self.initialise(seed)
        self.choose_vocabulary(head, counts)

    def choose_vocabulary(self, head: Tensor, counts: Tensor) -> None:
        """A reduced vocabulary becomes the most frequent tokens of `counts` int64 [V]; an LM head of the drafter's own
        becomes the rows of its tokens in the policy's `head` [V, H].
        """

    @abstractmethod
    def start_from_policy(self, read: Callable[[str], Tensor]) -> None:
        """Replaces weights of `initialise` by the policy's, which learn faster. `read` gives tensors by their Hugging
        Face names.
        """

    @abstractmethod
    def layout(self, batch: DraftBatch) -> DraftLayout:
        """The layout that `unroll` takes."""

    @abstractmethod
    def unroll(self, embed: Tensor, batch: DraftBatch, layout: Any, steps: int) -> list[Tensor]:
        """Drafts `steps` tokens ahead from every base, fed with the true tokens: outputs [N, H] for each position."""

    @abstractmethod
    def full_logits(self, outputs: Tensor, head: Tensor | None = None) -> Tensor:
        """Float32 [.., V] of outputs [.., H]: -inf for tokens outside the drafter's vocabulary. `head` [V, H] is the
        policy's.
        """

    def token_ids(self) -> Tensor | None:
        """The policy's ids [Vd] of the drafter's tokens; None: all, in order."""
        return None

    def linears(self) -> list[tuple[nn.Module, str, nn.Linear]]:
        """(parent, attribute, linear) of those that may compute in FP8."""
        return []

    def load_full(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Loads all tensors. Raises CheckpointError unless they are exactly those of `DrafterConfig.shapes`."""
        given = dict(named)
        self.config.check(given)
        with torch.no_grad():
            for name, target in self.state_dict(keep_vars=True).items():
                target.copy_(given[name])


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

"""Interfaces of a drafter of any kind: its shape, its training batches, its weights and arithmetic in training.

Legend: T packed tokens of B sequences, N bases, H hidden size, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megatron_tlt.errors import BackendError, CheckpointError, ConfigError, shortened
from megatron_tlt.models.decoders.torch.layers import rope_table
from megatron_tlt.models.hf.config import ModelConfig

if TYPE_CHECKING:
    from megatron_tlt.drafters.eagle.pairs import PairLayout

_FIRST_POSITIONS = 4096  # rotary table at start; it grows by need


@dataclass(frozen=True, slots=True)
class DrafterConfig(ABC):
    """A drafter of `policy`, of any kind. Subclasses are built with `of`, which checks."""

    kind: ClassVar[str]  # a name of `config.drafter_kinds.DRAFTERS`

    policy: ModelConfig
    layer: ModelConfig  # of one of its layers: heads, width of the MLP, rotary embedding, norms' epsilon
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()  # policy layers, from 0, whose outputs (residual stream) are read; ascending

    @property
    def reduced(self) -> bool:
        """Whether the drafter's vocabulary is a part of the policy's (`d2t`, `t2d`)."""
        return self.draft_vocab_size != self.policy.vocab_size

    def vocabulary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of a reduced vocabulary: d2t[i] + i is the policy's id of the drafter's token i, t2d marks the ids."""
        return {"d2t": (self.draft_vocab_size,), "t2d": (self.policy.vocab_size,)} if self.reduced else {}

    def served_layer(self, dtype: str) -> dict[str, Any]:
        """config.json of one of its layers for a serving engine, with weights of type `dtype`.

        Its `max_position_embeddings` is at least the policy's: vLLM drafts nothing behind the smaller one. The number
        is in none of the rotary frequencies that are computed here, and published drafters have the length that they
        were trained at.
        """
        positions = max(self.layer.max_position_embeddings, self.policy.max_position_embeddings)
        return replace(self.layer, max_position_embeddings=positions).to_hf(dtype)

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor; never the policy's embedding or LM head."""

    def check_states(self, aux_layers: tuple[int, ...]) -> None:
        """Raises BackendError for a decoder that returns other layers than those that the drafter reads."""
        if aux_layers != self.aux_layers:
            raise BackendError(f"a drafter of layers {self.aux_layers}, a decoder that returns {aux_layers}")

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
    hidden: Tensor  # [T, W], the policy's states at the same positions (`HiddenStateSample`)
    starts: list[int]  # [B + 1]
    first: list[int]  # [B], first base of each sequence, >= 1
    offsets: list[int]  # [B], position of each sequence's first token: > 0 for windows of long sequences
    drawn: np.ndarray  # bool [T], on the host: tokens that the policy drew; the others are context


class DrafterModel(nn.Module, ABC):
    """A drafter's weights and arithmetic in training.

    The policy's embedding and LM head are passed at every call. All tensors (`DrafterConfig.shapes`) are its
    `state_dict`; its parameters are trained.
    """

    d2t: Tensor | None
    t2d: Tensor | None
    trained_steps = 0  # optimizer steps behind the weights, set by the trainer: random choices of a loss follow it
    averaged_positions = 1  # drafted positions of which the loss is a mean and not a sum

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self._rope = rope_table(config.layer, min(config.layer.max_position_embeddings, _FIRST_POSITIONS))
        size, vocab = config.draft_vocab_size, config.policy.vocab_size
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64) if config.reduced else None)
        self.register_buffer("t2d", torch.arange(vocab) < size if config.reduced else None)

    head_parameters: ClassVar[tuple[str, ...]] = ()  # those that begin as rows of the policy's LM head

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Random weights."""

    def start_fresh(self, seed: int, read: Callable[[str], Tensor], head: Tensor, counts: Tensor) -> None:
        """`initialise`, `start_from_policy`, and `choose_vocabulary` of what responses have."""
        self.initialise(seed)
        self.start_from_policy(read)
        self.choose_vocabulary(head, counts)

    @abstractmethod
    def start_from_policy(self, read: Callable[[str], Tensor]) -> None:
        """Replaces weights of `initialise` by the policy's, which learn faster. `read` gives tensors by their Hugging
        Face names.
        """

    @abstractmethod
    def unroll(self, embed: Tensor, batch: DraftBatch, layout: PairLayout, steps: int) -> list[Tensor]:
        """Drafts `steps` tokens ahead from every base, fed with the true tokens: outputs [N, W], of H or more columns,
        for each position.
        """

    @abstractmethod
    def logits(self, outputs: Tensor, head: Tensor | None = None) -> Tensor:
        """[.., Vd] over the drafter's tokens (`token_ids`), of outputs [.., W], in their type. `head` [V, H] is the
        policy's.
        """

    def linears(self) -> list[tuple[nn.Module, str, nn.Linear]]:
        """(parent, attribute, linear) of those that may compute in FP8."""
        return []

    # -- a reduced vocabulary

    def choose_vocabulary(self, head: Tensor, counts: Tensor) -> None:
        """A reduced vocabulary becomes the most frequent tokens of `counts` int64 [V]; an LM head of the drafter's own
        becomes the rows of its tokens in the policy's `head` [V, H].
        """
        if self.config.reduced:
            self.set_vocabulary(most_frequent(counts, self.config.draft_vocab_size))
        self.take_head(head)

    def take_head(self, head: Tensor) -> None:
        """An LM head of its own becomes the rows of the drafter's tokens in the policy's `head` [V, H]."""

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Sets the reduced vocabulary: Vd ascending token ids. Raises ConfigError for anything else."""
        size, vocab = self.config.draft_vocab_size, self.config.policy.vocab_size
        ids = token_ids.long().cpu()
        fits = tuple(ids.shape) == (size,) and bool((ids.diff() > 0).all()) and 0 <= int(ids[0]) <= int(ids[-1]) < vocab
        if self.d2t is None or self.t2d is None or not fits:
            given = f"{tuple(ids.shape)} ids"
            raise ConfigError.of(
                "draft vocabulary", given, f"must be {size} ascending ids below {vocab}, of a reduced one"
            )
        self.d2t.copy_(ids - torch.arange(size))
        self.t2d.zero_()[ids] = True

    def token_ids(self) -> Tensor | None:
        """The policy's ids [Vd] of the drafter's tokens; None: all, in order."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    # -- parts of all kinds

    def draw_weights(self, seed: int, small: tuple[str, ...]) -> None:
        """Random matrices, those whose name has one of `small` scaled down; norms of 1, biases of 0."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 1:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    scale = 0.2 if any(part in name for part in small) else 1.0
                    p.copy_(torch.randn(p.shape, generator=generator) * scale * p.shape[1] ** -0.5)

    def reserve_positions(self, count: int, device: torch.device) -> None:
        """Makes the rotary table long enough for `count` positions; CUDA graphs keep its address."""
        if count > self._rope.shape[0] or device != self._rope.device:
            self._rope = rope_table(self.config.layer, max(count, self._rope.shape[0]), device)

    def rope(self, positions: Tensor, longest: int = 0) -> Tensor:
        """Rotary entries [T, D] of positions < `longest`, or of reserved ones."""
        if longest:
            self.reserve_positions(longest, positions.device)
        return self._rope[positions]

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


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens of counts [V], ascending ids [size]; of equals the smaller id."""
    order = counts.argsort(descending=True, stable=True)
    return order[:size].sort().values

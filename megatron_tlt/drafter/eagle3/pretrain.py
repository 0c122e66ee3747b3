"""Training of a drafter of kind eagle3: the same answers, read by a decoder that also returns three layers' outputs.

It is for serving elsewhere (`tools/export_drafter.py`): the rollouts here run drafters of kind eagle.

Legend: L tokens of an answer with its prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.checkpoint import SavedDrafter
from megatron_tlt.drafter.pretrain import DrafterPretraining
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.eagle.eagle3 import Eagle3Config, Eagle3Model, choose_vocabulary
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.models.torch.decoder import TorchDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.models.base import Decoder
    from megatron_tlt.types import HiddenStateSample, SamplingParams


class Eagle3Pretraining(DrafterPretraining):
    """Every rank holds a second copy of the policy in PyTorch: the engine keeps no layer's output."""

    model: Eagle3Model

    def __init__(
        self,
        config: Config,
        world: World,
        backend: RolloutBackend,
        params: SamplingParams,
        shape: Eagle3Config,
        start: SavedDrafter | None = None,
    ):
        """Raises ConfigError for a drafter of another policy than the config's, and under rollout.tp > 1."""
        if config.rollout.tp > 1:
            allowed = "a drafter of kind eagle3 learns from a whole policy on every rank: must be 1"
            raise ConfigError.of("rollout.tp", config.rollout.tp, allowed)
        self._shape, self._is_fresh = shape, start is None
        super().__init__(config, world, backend, params, start)
        if shape.policy != self._policy:
            allowed = "is not the policy that the drafter was made for"
            raise ConfigError.of("model.path", config.model.path, allowed)
        self._reader = TorchDecoder(
            self._policy, world.device, DTYPES[config.rollout.dtype], aux_layers=shape.layers
        )
        self._reader.load_weights(iter_weights(config.model.path, self._policy))

    def _build_model(self, start: SavedDrafter | None) -> Eagle3Model:
        model = Eagle3Model(self._shape)
        if start is not None:
            model.load_full(start.weights)
        return model

    def _prepare(self, data: Sequence[DraftSequence]) -> None:
        """Draws fresh weights: a reduced vocabulary is that of the answers."""
        if self._is_fresh:
            self.model.initialise(self._config.drafter.seed, self._head, self._vocabulary(data))

    def _vocabulary(self, data: Sequence[DraftSequence]) -> Tensor | None:
        """The most frequent answer tokens of all ranks; None for the whole vocabulary."""
        if not self._shape.reduced:
            return None
        counts = torch.zeros(self._policy.vocab_size, dtype=torch.int64)
        for s in data:
            counts += torch.bincount(s.token_ids[s.answer_start :], minlength=len(counts))
        total = torch.stack(self._world.all_gather_object(counts)).sum(0)
        chosen = choose_vocabulary(total, self._shape.draft_vocab_size)
        share = float(total[chosen].sum() / total.sum())
        self._print(f"drafts {len(chosen)} of {len(total)} tokens: {share:.2%} of the answers' tokens")
        return chosen

    def _hidden_states(self, samples: Sequence[HiddenStateSample]) -> Iterable[Tensor]:
        texts = [sample.token_ids.tolist() for sample in samples]
        rollout = self._config.rollout
        return read_hidden_states(self._reader, texts, rollout.block_size, rollout.max_batched_tokens)


def read_hidden_states(
    decoder: Decoder, texts: Iterable[Sequence[int]], block_size: int, max_tokens: int
) -> Iterator[Tensor]:
    """`DecoderOutput.all_hidden` of each text, [L, ..] on the CPU, in the decoder's type.

    Texts share forwards of at most `max_tokens` rows; a longer one has a forward of its own.
    """
    group: list[Sequence[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > max_tokens:
            yield from _hidden_of_group(decoder, group, block_size)
            group = []
        group.append(text)
    if group:
        yield from _hidden_of_group(decoder, group, block_size)


def _hidden_of_group(decoder: Decoder, texts: Sequence[Sequence[int]], size: int) -> Iterator[Tensor]:
    counts = [len(t) for t in texts]
    blocks = [-(-n // size) for n in counts]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    width = max(blocks)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lists = (
        [t for text in texts for t in text],
        [p for n in counts for p in range(n)],
        [b * size + p for b, n in zip(first, counts, strict=True) for p in range(n)],
        starts,
        counts,
        [[*range(b, b + n), *[0] * (width - n)] for b, n in zip(first, blocks, strict=True)],
        [starts[1] - 1],  # one row's logits: the least that every decoder computes
    )
    tensors = [torch.tensor(x, dtype=torch.int32, device=decoder.device) for x in lists]
    batch = replace(DecoderInput.of(tensors), all_hidden=True)
    hidden = decoder.forward(batch, decoder.new_kv_cache(sum(blocks), size)).all_hidden
    assert hidden is not None, "asked for"
    yield from hidden.cpu().split(counts)

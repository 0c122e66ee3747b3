"""A deterministic "language model" that reads its context back through block tables: wrong ones show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.errors import DataError
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput

FACTOR = np.uint64(0x9E3779B97F4A7C15)


def context_logits(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Logits float32 [V] in (-4, 4) from a hash of the whole context, order included."""
    with np.errstate(over="ignore"):
        h = (tokens.astype(np.uint64) + np.uint64(1)) * FACTOR
        h = (h ^ (h >> np.uint64(31))) + np.arange(len(h), dtype=np.uint64)
        h = (h * FACTOR) ^ (h >> np.uint64(27))
        z = (h.sum(dtype=np.uint64) + np.arange(1, vocab_size + 1, dtype=np.uint64)) * FACTOR
        z = (z ^ (z >> np.uint64(29))) * FACTOR
    return ((z >> np.uint64(40)).astype(np.float64) / 2**21 - 4).astype(np.float32)


class FakeDecoder:
    """Keeps (token, position) of every slot as its "cache"; asserts all that a decoder may rely on."""

    device = torch.device("cpu")
    kind = "fake"

    def __init__(self, vocab_size: int = 50):
        self.vocab_size = vocab_size
        self.prefilled = 0  # prompt rows computed, to show that a prompt is prefilled once
        self.steps = 0
        self.weights: dict[str, Tensor] = {}

    def new_kv_cache(self, num_blocks: int, block_size: int) -> np.ndarray:
        self.block_size = block_size
        return np.full((num_blocks, block_size, 2), -1, np.int64)

    def copy_blocks(self, kv: np.ndarray, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        kv[dst] = kv[src]

    def load_weights(self, named: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        self.weights.update(named)

    def forward(self, batch: DecoderInput, kv: np.ndarray) -> DecoderOutput:
        self.steps += 1
        arrays = (batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start, batch.context_lens)
        tokens, positions, slots, starts, lens = (a.numpy() for a in arrays)
        assert all(a.dtype == np.int32 for a in (tokens, positions, slots, starts, lens))
        assert len(set(slots.tolist())) == len(slots) == len(tokens) == starts[-1]
        flat = kv.reshape(-1, 2)
        flat[slots, 0], flat[slots, 1] = tokens, positions
        logits = []
        for row in batch.logit_rows.tolist():
            seq = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(positions[row]) + 1
            assert length <= lens[seq]
            table = batch.block_tables[seq].numpy()
            at = np.arange(length)
            read = flat[table[at // self.block_size] * self.block_size + at % self.block_size]
            assert (read[:, 1] == at).all(), "the block table does not lead to this sequence's positions"
            logits.append(context_logits(read[:, 0], self.vocab_size))
        counts = np.diff(starts)
        assert ((lens - counts) == positions[starts[:-1]]).all()
        self.prefilled += int(counts[counts > 1].sum())
        out = np.stack(logits) if logits else np.zeros((0, self.vocab_size), np.float32)
        return DecoderOutput(torch.from_numpy(out), torch.zeros(len(logits), 4))


class NullDecoder(FakeDecoder):
    """Costs nothing: what is left of a step is the engine's own time."""

    def forward(self, batch: DecoderInput, kv: np.ndarray) -> DecoderOutput:
        rows = len(batch.logit_rows)
        if rows not in (known := self.__dict__.setdefault("_outputs", {})):
            known[rows] = DecoderOutput(torch.randn(rows, self.vocab_size), torch.zeros(rows, 4))
        return known[rows]


class CharTokenizer:
    """Token i is the i-th character; token 0 ends a response."""

    has_chat_template = True

    def __init__(self, alphabet: str = "abcdefghijklmnopqrstuvwxyz .,!?0123456789ABCDEFGHI"):
        self.alphabet = "\0" + alphabet
        self.eos_token_ids, self.end_token_id = (0,), 0
        self.vocab_size = len(self.alphabet)

    def special_id(self, text: str) -> None:
        """It has no special tokens with a text."""

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(c) for c in text]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def checked(self, ids: list[int]) -> list[int]:
        return ids

    def encode_behind(self, before: str, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(self, messages: object) -> str:
        raise DataError("no conversation but the prompt's")

    def encode_chat(
        self, prompt: str | Sequence[Mapping[str, str]], system: None = None, tools: object = ()
    ) -> list[int]:
        text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
        return self.encode(f"A {text} B")

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in token_ids if i)

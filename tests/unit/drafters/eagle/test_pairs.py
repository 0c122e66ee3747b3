"""The drafter's attention in training: against plain softmax, and what it keeps for the way back."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.drafters.eagle import pairs
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.eagle.pairs import PairLayout, attend_pairs, take
from megatron_tlt.drafters.training.batching import collate
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen3"]
HEADS, KV, D = 6, 2, 8


def dense(q, keys, values, chain, batch, layout) -> torch.Tensor:
    """The same, base by base and head by head, with one softmax over all that a base sees."""
    rows, out = iter(range(len(q))), torch.empty_like(q)
    for start, end, first in zip(batch.starts, batch.starts[1:], batch.first, strict=False):
        for place in range(start + first, end - 1):
            n = next(rows)
            for head in range(HEADS):
                own = [(k[n, head // 3], v[n, head // 3]) for k, v in chain]
                k = torch.stack([*keys[start + 1 : place + 1, head // 3], *(pair[0] for pair in own)])
                v = torch.stack([*values[start + 1 : place + 1, head // 3], *(pair[1] for pair in own)])
                out[n, head] = (k @ q[n, head] * D**-0.5).softmax(0) @ v
    return out


@pytest.mark.parametrize("max_scores", [1 << 25, 700, 1])
@pytest.mark.parametrize("steps", [0, 2])
def test_attention_in_blocks_is_attention(monkeypatch, max_scores: int, steps: int) -> None:
    """Values and gradients, whole, in blocks of some queries, and in blocks of one."""
    monkeypatch.setattr(pairs, "_MAX_SCORES", max_scores)
    batch = collate([random_sequence(CONFIG, n, p) for n, p in ((9, 4), (17, 2), (3, 1), (12, 8))])
    layout = PairLayout(batch)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    bases, tokens = len(layout.bases), len(batch.tokens)
    q, keys, values = random(bases, HEADS, D), random(tokens, KV, D), random(tokens, KV, D)
    chain = [(random(bases, KV, D), random(bases, KV, D)) for _ in range(steps)]
    given = [q, keys, values, *(t for pair in chain for t in pair)]
    upstream = random(bases, HEADS, D).detach()
    far = [take(t, layout.keys).transpose(1, 2) for t in (keys, values)]
    got = attend_pairs(q, *far, chain, layout)
    wanted = dense(q, keys, values, chain, batch, layout)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for mine, plain in zip(*(torch.autograd.grad(t, given, upstream) for t in (got, wanted)), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5)


def saved_bytes(length: int) -> int:
    """Bytes that one unrolled sequence of `length` tokens keeps for the way back, each storage once."""
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = EagleModel(EagleConfig.of(CONFIG))
    batch = collate([random_sequence(CONFIG, length, 3)])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model.unroll(lookup_tables(CONFIG)[0], batch, PairLayout(batch), 3)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert outputs[0].requires_grad
    return sum(size for address, size in seen.items() if address not in weights)


def test_what_is_kept_grows_with_the_tokens_not_with_their_square() -> None:
    short, long = saved_bytes(256), saved_bytes(1024)
    assert long < 4.1 * short

"""Both decoders against Hugging Face `transformers` (eager), prefill and decode, through shuffled blocks."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.models.decoders.factory import build_decoder
from tests.helpers.tiny_models import MOE_FAMILIES, Driver, hf_model, model_config, named_weights

FAMILIES = ("qwen2", "qwen3", "llama")


def run_pieces(decoder, sequences: list[list[int]], pieces: list[int]) -> list[torch.Tensor]:
    """Feeds all sequences side by side, `pieces` tokens at a time, then one by one; logits per sequence."""
    driver = Driver(decoder, num_blocks=160)
    collected: list[list[torch.Tensor]] = [[] for _ in sequences]
    at = [0] * len(sequences)
    sizes = iter(pieces)
    while any(a < len(s) for a, s in zip(at, sequences, strict=True)):
        size = next(sizes, 1)
        chunks = [(i, s[at[i] : at[i] + size]) for i, s in enumerate(sequences) if at[i] < len(s)]
        rows = driver.step(chunks).logits.split([len(ids) for _, ids in chunks])
        for (i, ids), r in zip(chunks, rows, strict=True):
            collected[i].append(r)
            at[i] += len(ids)
    return [torch.cat(c) for c in collected]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_fp32_logits_equal_transformers(family: str, kernels: str) -> None:
    model = hf_model(family)
    decoder = build_decoder(model_config(model), kernels=kernels, threads=2)
    decoder.load_weights(named_weights(model))
    generator = torch.Generator().manual_seed(5)
    lengths = (600, 37, 1) if family == "llama" else (70, 33, 5, 1)
    sequences = [torch.randint(0, 131, (n,), generator=generator).tolist() for n in lengths]
    pieces = [570, 7] if family == "llama" else [20, 13]
    for ids, got in zip(sequences, run_pieces(decoder, sequences, pieces), strict=True):
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0]
        assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(family: str, kernels: str) -> None:
    """bf16 rounds; the yardstick is what transformers loses in bf16 on the same weights. Rounding chooses experts, so
    mixtures have no such yardstick.
    """
    model = hf_model(family)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    decoder = build_decoder(model_config(model), dtype=torch.bfloat16, kernels=kernels)
    decoder.load_weights([(n, w.to(torch.bfloat16)) for n, w in named_weights(model)])
    ids = torch.randint(0, 131, (90,), generator=torch.Generator().manual_seed(6)).tolist()
    got = run_pieces(decoder, [ids], [50])[0]
    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0]
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model.to(torch.bfloat16)
        model.model.rotary_emb.inv_freq = frequencies  # `.to` rounds this buffer, `from_pretrained` does not
        in_bf16 = model(torch.tensor([ids])).logits[0].float()
    ours, theirs = (got - exact).abs(), (in_bf16 - exact).abs()
    assert ours.mean() <= 1.25 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()

"""The doctor's process for Transformer Engine: a linear and a packed attention, forward and backward, against PyTorch.

A build for another torch or CUDA imports well and fails, or computes wrongly, at its first product.

Legend: T packed rows, H heads, D head size, I inputs, O outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

_LENGTHS = (96, 31, 129)  # packed sequences
_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
_LIMIT = 0.03  # largest difference over the largest value: bf16 has 8 bits


def main() -> str | None:
    """argv: the device. Returns what differs, None if nothing does; raises the library's own errors."""
    device = torch.device(sys.argv[1])
    torch.manual_seed(1)
    wrong = [*_differences("linear", *_linears(device)), *_differences("attention", *_attentions(device))]
    return "; ".join(wrong) or None


def _differences(name: str, found: list[Tensor], expected: list[Tensor]) -> list[str]:
    """A text for each tensor that differs: the output, then the gradients of the inputs."""
    texts = []
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        difference = (a.detach().float() - b.detach().float()).abs().max()
        error = float(difference / b.detach().float().abs().max())
        if not error <= _LIMIT:  # NaN, too
            what = "output" if index == 0 else f"gradient {index}"
            texts.append(f"{name}: {what} is {error:.2g} of its largest value off (at most {_LIMIT})")
    return texts


def _gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The output of `function`, and the gradients of its inputs and weights, of a loss whose gradient varies."""
    given = [x.detach().requires_grad_() for x in inputs]
    out = function(*given)
    factors = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out.float() * factors).sum(), [*given, *weights])]


def _linears(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """[T, O], the gradients of rows [T, I] and weight [O, I]: Transformer Engine's and PyTorch's."""
    import transformer_engine.pytorch as te

    rows, inputs, outputs = sum(_LENGTHS), 256, 128
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    module = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device=device)
    return _gradients(module, [x], [module.weight]), _gradients(linear, [x, module.weight])


def _attentions(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """[T, H * D] and the gradients of queries, keys and values, each [T, heads, D]."""
    import transformer_engine.pytorch as te

    rows, heads = sum(_LENGTHS), (_HEADS, _KV_HEADS, _KV_HEADS)
    qkv = [torch.randn(rows, n, _HEAD_SIZE, dtype=torch.bfloat16, device=device) for n in heads]
    ends = torch.tensor([0, *_LENGTHS], device=device).cumsum(0).to(torch.int32)
    module = te.DotProductAttention(
        _HEADS, _HEAD_SIZE, num_gqa_groups=_KV_HEADS, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal",
    )  # fmt: skip
    packed = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": max(_LENGTHS),
        "max_seqlen_kv": max(_LENGTHS),
    }
    found = _gradients(lambda q, k, v: module(q, k, v, **packed).view(rows, -1), qkv)
    return found, _gradients(_each_sequence, qkv)


def _each_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of each packed sequence alone, [T, H * D]."""
    outputs = []
    for parts in zip(*(x.split(list(_LENGTHS)) for x in (q, k, v)), strict=True):
        queries, keys, values = (part.transpose(0, 1)[None] for part in parts)
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


if __name__ == "__main__":
    sys.exit(main())

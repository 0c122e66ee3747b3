"""Compiles for sm_90 every kernel that host code launches on meta tensors; prints what each takes, as JSON.

`TRITON_INTERPRET=0 python -m tests.helpers.aot`. No GPU is needed: ptxas and cuobjdump come with triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from megatron_tlt.models.decoders.inputs import DecoderInput
from megatron_tlt.models.decoders.torch.paged import PagedPlan
from tests.helpers.budget import Launch, noted_launches

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}


def compiled(launch: Launch) -> dict[str, Any]:
    """Registers a thread, bytes of spilled registers, bytes of shared memory a block, of one launch's kernel."""
    signature, constants, aligned = {}, {}, {}
    options = {k: v for k, v in launch.arguments.items() if k in ("num_warps", "num_stages")}
    for index, (name, parameter) in enumerate(zip(launch.kernel.arg_names, launch.kernel.params, strict=True)):
        value = launch.arguments[name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(launch.kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"kernel": named(launch), "shared": made.metadata.shared, **usage(made.asm["cubin"])}


def named(launch: Launch) -> str:
    """The kernel and, of products, float32; of attention the type, rows times heads of a tile, what else is
    compiled in.
    """
    if launch.name in ("_gate_up", "_down", "_product"):
        return launch.name + " fp32" * (launch.arguments["weight"].dtype is torch.float32)
    if launch.name != "_attend":
        return launch.name
    given = launch.arguments
    more = [name for name in ("HAS_LOW", "INVARIANT", "BLOCK") if given[name]]
    return " ".join(["_attend", _TYPES[given["keys"].dtype], str(given["M"]), *more])


def usage(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump --dump-resource-usage` says."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    names = {"REG": "registers", "STACK": "stack", "LOCAL": "local"}
    return {names[key]: int(value) for key, value in found.items()}


def launches() -> list[Launch]:
    """Every kernel in its forms, at the shapes of Qwen2.5-7B (and norms of heads as in Qwen3)."""
    with noted_launches() as found:
        _launch_sampling(256, 152064)
        _launch_layers(64, 3584, 18944, 28, 4, 128)
        _launch_attention(64, 28, 4, 128)
        _launch_experts()
        _launch_products(64, 3584, 18944, 4608)
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_sampling(rows: int, vocab: int) -> None:
    from megatron_tlt.models.decoders.torch.kernels.sampling import best_candidates, draw

    numbers, counts, keys = (empty(rows, dtype=t) for t in (torch.float32, torch.int32, torch.int64))
    for is_masked in (False, True):
        draw(empty(rows, vocab), keys, numbers, counts, numbers, numbers, is_masked)
    for columns, ids in ((vocab, None), (4096, (4096,)), (16, (rows, 16))):
        best_candidates(empty(rows, columns), keys, numbers, 2, ids and empty(*ids, dtype=torch.int64))


def _launch_layers(rows: int, hidden: int, width: int, heads: int, kv_heads: int, d: int) -> None:
    from megatron_tlt.models.decoders.torch.kernels.layers import FUSED

    slots, rope = empty(rows, dtype=torch.int64), empty(rows, d)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, norm = (empty(*shape, dtype=dtype) for shape in ((rows, hidden), (hidden,), (d,)))
        qkv, cache = (
            empty(*shape, dtype=dtype) for shape in ((rows, (heads + 2 * kv_heads) * d), (2, 4096, kv_heads, d))
        )
        for part in (None, x):
            FUSED.add_norm(x, part, weight, 1e-6)
        for norms in (None, (norm, norm, 1e-6)):
            FUSED.rotate_into(qkv, norms, rope, slots, cache)
            FUSED.rotate_into(empty(rows, 2 * kv_heads * d, dtype=dtype), norms, rope, slots, cache)
        FUSED.gated_silu(empty(rows, 2 * width, dtype=dtype))


def _launch_experts() -> None:
    """Decoding and prefill, at the shapes of Qwen3-30B-A3B."""
    from megatron_tlt.models.decoders.torch.kernels.experts import mix_experts, route

    hidden, width, count, k = 2048, 768, 128, 8
    for rows, dtype in ((64, torch.bfloat16), (600, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float32)):
        h, router = empty(rows, hidden, dtype=dtype), empty(count, hidden, dtype=dtype)
        gate_up, down = empty(count, 2 * width, hidden, dtype=dtype), empty(count, hidden, width, dtype=dtype)
        mix_experts(h, *route(h, router, k, True), gate_up, down)


def _launch_products(rows: int, hidden: int, width: int, qkv: int) -> None:
    """With splits of K and a bias, with splits, with neither."""
    from megatron_tlt.models.decoders.torch.kernels.products import product

    for dtype in (torch.bfloat16, torch.float32):
        for n, k, bias in ((qkv, hidden, empty(qkv, dtype=dtype)), (hidden, width, None), (2 * width, hidden, None)):
            product(empty(rows, k, dtype=dtype), empty(n, k, dtype=dtype), bias)


def _launch_attention(sequences: int, heads: int, kv_heads: int, d: int) -> None:
    """Decoding, verification, the drafter's window, split, prefill, whose tiles have one query head, and blocks."""
    from megatron_tlt.models.decoders.torch.kernels.attention import attend

    low, bf16 = empty(sequences, dtype=torch.int32), torch.bfloat16
    plain = [(bf16, 1, None, 1), (bf16, 1, low, 64), (bf16, 8, None, 1), (bf16, 512, None, 1)]
    plain.append((torch.float32, 512, None, 1))
    forms = [(*form, False) for form in plain] + [(t, 1, None, None, True) for t in (bf16, torch.float32)]
    forms += [(t, 8, low, splits, False, True) for t, splits in ((bf16, 1), (bf16, 64), (torch.float32, 1))]
    for dtype, rows, first, splits, is_invariant, *is_block in forms:
        total, cache = sequences * rows, empty(2, 4096, kv_heads, d, dtype=dtype)
        row, starts = empty(total, dtype=torch.int32), empty(sequences + 1, dtype=torch.int32)
        tables, lengths = empty(sequences, 64, dtype=torch.int32), empty(sequences, dtype=torch.int32)
        batch = DecoderInput(row, row, row, starts, lengths, tables, row)
        plan = PagedPlan(attend, batch, 16, (kv_heads, heads // kv_heads), rows, first, splits, is_invariant)
        own = empty(2, total, kv_heads, d, dtype=dtype) if is_block else None
        plan.attend(empty(total, heads, d, dtype=dtype), cache[0], cache[1], own)


if __name__ == "__main__":
    json.dump([compiled(launch) for launch in launches()], sys.stdout)

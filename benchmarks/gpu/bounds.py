"""How fast decoding could be: what a step must read, and what it must compute. Pure functions; torch-free.

One decoding step of B sequences with C cached tokens each reads every weight once and every cached key and value once,
and takes at least bytes / bandwidth; B tokens come out of it. Left out, so the bound is not reached: activations,
norms, sampling, launches.

Legend: B sequences, C context, L layers, H hidden, F intermediate, V vocabulary, A / K query and kv heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Shape(Protocol):
    """Fields of a model that the bounds read (`megatron_tlt.models.hf.config.ModelConfig` has them)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Device:
    """Peak figures of a device."""

    bandwidth: float  # bytes a second
    flops: float  # dense operations a second in the type that is computed with


# Data sheets: memory bandwidth, dense bf16. By a part of the name that CUDA reports; the longer names first.
DATA_SHEETS: tuple[tuple[str, float, float], ...] = (
    ("H200", 4.8e12, 989e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100 NVL", 3.9e12, 835e12),
    ("H100", 3.35e12, 989e12),
    ("A100-SXM4-40GB", 1.555e12, 312e12),
    ("A100-PCIE-40GB", 1.555e12, 312e12),
    ("A100", 2.039e12, 312e12),
    ("L40S", 0.864e12, 362e12),
    ("B200", 8.0e12, 2250e12),
)


def data_sheet(name: str) -> Device | None:
    """The device of that name; None: not in the table."""
    for part, bandwidth, flops in DATA_SHEETS:
        if part in name:
            return Device(bandwidth, flops)
    return None


def matrix_elements(shape: Shape) -> int:
    """Elements of all matrices that a row is multiplied with, LM head included."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


def step_bytes(shape: Shape, batch: int, context: float, element: int) -> float:
    """Bytes that one step reads: matrices, and cached keys and values; of the embedding only the rows it looks up."""
    cached = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    rows = batch * shape.hidden_size
    return float(element * (matrix_elements(shape) + batch * context * cached + rows))


def bound(shape: Shape, device: Device, batch: int, context: float, element: int) -> float:
    """Tokens a second that no engine exceeds: of plain decoding by `batch` sequences with `context` cached tokens each,
    on average over the run, by what the device reads in a second.
    """
    return batch * device.bandwidth / step_bytes(shape, batch, context, element)


def mean_context(prompt: int, new_tokens: int) -> float:
    """Cached tokens of an average step of a request: step i of n has the prompt and i - 1 tokens in its cache."""
    return prompt + (new_tokens - 1) / 2


def train_flops(shape: Shape, sequences: int, length: int) -> float:
    """Operations of a forward and a backward pass over packed causal sequences, nothing recomputed.

    A token sees (length + 1) / 2 positions on average; the backward pass has two products for each of the forward's.
    """
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * (length + 1) / 2
    return float(3 * sequences * length * (2 * matrix_elements(shape) + attention))

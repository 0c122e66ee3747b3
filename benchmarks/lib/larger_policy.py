"""Makes a small policy larger without changing its outputs: for benchmarks where weights must not fit a cache."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_tlt.drafter.checkpoint import load_drafter, save_drafter
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.model import eagle_parameter_shapes
from megatron_tlt.models.loader import iter_weights, save_hf

Fill = Callable[[str, tuple[int, ...], Tensor | None], Tensor]
"""A tensor of the larger policy from its name, its shape and the small policy's tensor, where that has one."""


def deepen(model: Path, layers: int, folder: Path) -> Path:
    """A copy of the policy with `layers` layers, the added ones without effect: same logits, bit for bit.

    Their output projections are zero, the others random. Training would change them.
    """
    generator = torch.Generator().manual_seed(0)

    def fill(name: str, shape: tuple[int, ...], known: Tensor | None) -> Tensor:
        if known is not None:
            return known
        if "o_proj" in name or "down_proj" in name:
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator) * 0.05 + (len(shape) == 1)

    return _write(model, folder, lambda small: replace(small, num_layers=layers), fill)


def widen(model: Path, intermediate_size: int, folder: Path) -> Path:
    """A copy of the policy with wider MLPs, the added units without effect, also on gradients: they stay so.

    Their gates and outputs are zero: silu(0) = 0 is what the output's gradient is multiplied by, and the output's
    zero what the gate's is.
    """

    def fill(name: str, shape: tuple[int, ...], known: Tensor | None) -> Tensor:
        assert known is not None, f"{name} is not in {model}"
        return _padded(known, shape)

    return _write(model, folder, lambda small: replace(small, intermediate_size=intermediate_size), fill)


def widen_drafter(drafter: Path, small: ModelConfig, large: ModelConfig, folder: Path) -> Path:
    """The drafter of `small` as one of `large`, which is `small` with wider MLPs; as `widen`."""
    known = load_drafter(drafter, small).weights
    shapes = eagle_parameter_shapes(large)
    save_drafter(folder, large, {name: _padded(known[name], shape) for name, shape in shapes.items()})
    return folder


def _padded(known: Tensor, shape: tuple[int, ...]) -> Tensor:
    wide = torch.zeros(shape, dtype=known.dtype)
    wide[tuple(slice(size) for size in known.shape)] = known
    return wide


def _write(model: Path, folder: Path, grow: Callable[[ModelConfig], ModelConfig], fill: Fill) -> Path:
    small = ModelConfig.from_hf(model)
    large, known = grow(small), dict(iter_weights(model, small))

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in large.parameter_shapes().items():
            yield name, fill(name, shape, known.get(name))

    save_hf(folder, large, weights())
    for file in model.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, folder)
    return folder

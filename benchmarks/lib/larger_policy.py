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
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.writer import save_hf

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


def widen(
    model: Path,
    intermediate_size: int,
    folder: Path,
    *,
    hidden_size: int | None = None,
    max_positions: int | None = None,
) -> Path:
    """A copy of the policy with wider MLPs, and with `hidden_size` also a wider residual stream and more heads.

    The logits are those of the small policy up to rounding, and training leaves every added value zero, as long as
    the optimizer has no weight decay: an added value meets a zero in the forward pass (its input) and one in the
    backward pass (the weight behind it), so its gradient is zero; silu(0) = 0 does the same for added units of an MLP.
    Head size and queries per key head stay. RMSNorm divides by the mean square of more dimensions, so its weights
    are multiplied by sqrt(h / H) and its epsilon by h / H (h, H: hidden sizes of the small and the large policy).
    `max_positions`: the longest sequence that the copy's config.json allows, rotary embeddings have no table to widen.
    """

    def fill(name: str, shape: tuple[int, ...], known: Tensor | None) -> Tensor:
        assert known is not None, f"{name} is not in {model}"
        return _padded(name, known, shape)

    def grow(small: ModelConfig) -> ModelConfig:
        large = _wider(small, hidden_size or small.hidden_size, intermediate_size)
        return replace(large, max_position_embeddings=max_positions or small.max_position_embeddings)

    return _write(model, folder, grow, fill)


def widen_drafter(drafter: Path, small: ModelConfig, large: ModelConfig, folder: Path) -> Path:
    """The drafter of `small` as one of `large`, which `widen` made of `small`; as `widen`.

    `fc` reads an embedding and a hidden state side by side, so its two halves are padded each for itself.
    """
    known, h = load_drafter(drafter, small).weights, small.hidden_size

    def fill(name: str, shape: tuple[int, ...]) -> Tensor:
        if name != "fc.weight":
            return _padded(name, known[name], shape)
        half = (large.hidden_size, large.hidden_size)
        return torch.cat([_padded(name, part, half) for part in known[name].split(h, dim=1)], dim=1)

    config = EagleConfig.of(large)
    save_drafter(folder, config, {name: fill(name, shape) for name, shape in config.shapes().items()})
    return folder


def _wider(small: ModelConfig, hidden_size: int, intermediate_size: int) -> ModelConfig:
    """Raises ValueError unless the larger hidden size is a multiple of the small one and the MLPs are no smaller."""
    times, rest = divmod(hidden_size, small.hidden_size)
    if rest or times < 1 or intermediate_size < small.intermediate_size:
        raise ValueError(
            f"hidden size {hidden_size} must be a multiple of {small.hidden_size}, MLPs of {intermediate_size} units "
            f"must have {small.intermediate_size} or more"
        )
    return replace(
        small,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=small.num_heads * times,
        num_kv_heads=small.num_kv_heads * times,
        rms_norm_eps=small.rms_norm_eps / times,
    )


def _padded(name: str, known: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`known` with zeros behind it in every dimension; weights of RMSNorm scaled for the longer vector."""
    wide = torch.zeros(shape, dtype=known.dtype)
    wide[tuple(slice(size) for size in known.shape)] = known
    return wide * (len(known) / len(wide)) ** 0.5 if "norm" in name else wide


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

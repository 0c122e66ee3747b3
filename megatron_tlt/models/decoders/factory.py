"""Choosing and building a decoder."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

import torch

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.keyed_noise import SampleKernel
from megatron_tlt.models.decoders.native.build import missing_for_native, missing_for_triton
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig

_log = logging.getLogger(__name__)

_NARROW = 128  # head dimension up to which attention's tiles fit every GPU
_WIDE_BYTES = 164_864 + 1024  # of shared memory above, by the compiler for sm_90, and the driver's share of a block

Kernels = Literal["auto", "native", "torch"]
Numerics = Literal["default", "invariant"]


def build_decoder(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = "auto",
    threads: int = 1,
    tp: TensorParallel | None = None,
    numerics: Numerics = "default",
    aux_layers: tuple[int, ...] = (),
) -> Decoder:
    """An empty decoder; load weights next. Its `kind` is "native" or "torch".

    "auto" is the native one on CPU, on CUDA PyTorch with Triton's kernels, which "torch" leaves out. `threads` is
    used by the native decoder only; `aux_layers`: see `Decoder`.
    "invariant" numerics: a row's bits do not depend on its batch (always so in the native decoder). Warns on CUDA
    without Triton. Raises ConfigError for a choice that cannot run on `device` or lacks a C compiler, BackendError
    when the native decoder cannot be built.
    """
    device = torch.device(device)
    if kernels == "native" and device.type != "cpu":
        raise ConfigError.of("rollout.kernels", kernels, f"runs on CPU only, not on {device}")
    if kernels == "native" or (kernels == "auto" and device.type == "cpu"):
        if (missing := missing_for_native()) is not None:
            raise ConfigError.of("rollout.kernels", kernels, missing)
        from megatron_tlt.models.decoders.native.decoder import NativeDecoder

        return NativeDecoder(config, threads, tp, aux_layers, dtype)
    is_invariant, has_triton = numerics == "invariant", _has_triton(kernels, device)
    if kernels == "auto" and device.type == "cuda" and not has_triton:
        _log.warning("no triton here: attention gathers keys and values, sampling takes some 50 kernels a step")
    if not has_triton:
        return TorchDecoder(config, device, dtype, tp, is_invariant, aux_layers=aux_layers)
    if (missing := missing_for_triton()) is not None:
        allowed = f"needs a C compiler and Python's headers for Triton's kernels: {missing}; 'torch' does without"
        raise ConfigError.of("rollout.kernels", kernels, allowed)
    _require_shared_memory(config.head_dim, kernels, device)
    _log.info("Triton compiles some 50 kernels in a first start, a minute or two; later ones read its cache")
    from megatron_tlt.models.decoders.torch.kernels.attention import attend
    from megatron_tlt.models.decoders.torch.kernels.layers import FUSED, INVARIANT

    ops = INVARIANT if is_invariant else FUSED
    return TorchDecoder(config, device, dtype, tp, is_invariant, paged=attend, aux_layers=aux_layers, ops=ops)


def _require_shared_memory(head_dim: int, kernels: str, device: torch.device) -> None:
    """Raises ConfigError for a GPU on which the tiles of paged attention do not fit: of compute capability 8.6 or 8.9,
    with a head dimension above 128.
    """
    if head_dim > _NARROW:
        gpu = torch.cuda.get_device_properties(device)
        if gpu.shared_memory_per_multiprocessor < _WIDE_BYTES:
            needs = f"{_WIDE_BYTES >> 10} KiB of shared memory for a head dimension of {head_dim}"
            has = f"{gpu.name} has {gpu.shared_memory_per_multiprocessor >> 10}"
            raise ConfigError.of("rollout.kernels", kernels, f"needs {needs}, {has}: must be 'torch'")


def sample_kernel(kernels: Kernels, device: torch.device) -> SampleKernel | None:
    """The kernel that draws tokens (`rollout.sampler`); None: PyTorch draws them."""
    if not _has_triton(kernels, device):
        return None
    from megatron_tlt.models.decoders.torch.kernels.sampling import draw

    return draw


def _has_triton(kernels: Kernels, device: torch.device) -> bool:
    """Whether Triton's kernels run: CUDA builds of PyTorch bring it on Linux."""
    return kernels == "auto" and device.type == "cuda" and importlib.util.find_spec("triton") is not None

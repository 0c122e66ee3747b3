"""Everything in the actor that changes how a foreign library behaves, each with the condition of its removal.

Every module that imports megatron imports this one first. Found by experiment with megatron-core 0.16.1. Two modules
replace a part of megatron-core through its classes and describe it at their top: `optimizer_shards.py` and
`shard_writer.py`.

| what | where |
|---|---|
| megatron's CUDA calls run on a CPU | `cpu_as_cuda`, `_replace_cuda_names` |
| fused GPU functions stay uncompiled without a GPU | `_import_without_compiler` |
| gradients go into their buffer without apex | `_offer_gradient_fusion` |
| SGD has a state to load | `give_sgd_a_state_function` |
| one RoPE table for all lengths | `keep_one_table` |
| checkpoints are never unpickled | `load_numbers_only` |
| routers without Transformer Engine | `_define_te_general_gemm` |
| a warning of every layer | `_quiet_a_warning` |
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()


# -- megatron-core without CUDA. A `TorchFunctionMode`, an extension point of PyTorch, reads "cuda" as "cpu". Names are
# replaced in torch.cuda only, none inside megatron. With CUDA all of it is inert. Remove when megatron-core gets
# devices, streams and random states from `torch.accelerator`, not from `torch.cuda`.


def cpu_as_cuda() -> contextlib.AbstractContextManager[Any]:
    """Context in which megatron's literal "cuda" devices mean the CPU.

    Enter it around every call into megatron. Thread-local and re-entrant; does nothing when CUDA is there.
    """
    return contextlib.nullcontext() if HAS_CUDA else _CpuAsCuda()


def current_device() -> torch.device:
    """Where this rank's parameters live."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else _CPU


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CpuAsCuda(TorchFunctionMode):
    """Rewrites explicit CUDA devices, and returns `tensor.type()` as megatron's optimizers compare it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads.py asserts on "torch.cuda.FloatTensor"; the check keeps nested modes idempotent.
            name = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _NoStream:
    """A stream, an event and a stream context on a device where everything is already in order."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = record_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        """An event that has already happened."""
        return event or _NoStream()

    def query(self) -> bool:
        """Whether the work is done: always."""
        return True


def _replace_cuda_names() -> None:
    """Replaces what megatron uses of torch.cuda.

    Must happen before megatron is imported: recompute keeps a reference to `_lazy_call`, and the original
    appends to a queue that nothing ever empties.
    """
    if "megatron.core" in sys.modules:
        raise RuntimeError("import megatron_tlt.actor.compat before megatron: its CPU names are already bound")
    cuda: Any = torch.cuda
    stream = _NoStream()
    cuda.current_device = lambda: _CPU  # device= of sequence parallel, pipeline receives, DDP buffers, RoPE
    cuda.synchronize = lambda device=None: None  # pipeline sends, checkpoint saves
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda._lazy_call = lambda callback, **_: callback()  # recompute's random states
    cuda.default_generators = defaultdict(lambda: torch.default_generator)  # indexed with current_device()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.Stream = cuda.Event = _NoStream  # checkpoint staging
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda wanted=None: stream


def _import_without_compiler() -> None:
    """Imports megatron-core with its fused functions left as they are.

    It passes them to `torch.compile`, which loads PyTorch's compiler at once: a third of a rank's start-up time and
    80 MiB, for GPU kernels that nothing here calls. Remove when megatron-core compiles at the first call.
    """
    compile_, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        from megatron.core.jit import disable_jit_fuser

        disable_jit_fuser()  # for later imports
    finally:
        torch.compile = compile_


# -- apex


def _accumulate_weight_gradient(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad_output^T rows: [out, in] fp32 from [T, out] and [T, in]. In one product, if all are fp32."""
    if rows.dtype is main_grad.dtype:
        main_grad.addmm_(grad_output.t(), rows)
    else:
        main_grad.add_(grad_output.t() @ rows)


def _offer_gradient_fusion() -> None:
    """Offers megatron apex's extension `fused_weight_gradient_mlp_cuda`, as far as it calls it, where it is missing.

    With it (`gradient_accumulation_fusion`) a linear layer adds to the gradient buffer itself. Without, every layer
    writes its gradient to fresh memory, and a hook adds that to the buffer. Transformer Engine's layers have their own;
    megatron lets them use it only if the LM head, which is megatron's, finds this one. Remove when megatron-core has
    the function itself.
    """
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = _accumulate_weight_gradient  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


# -- single calls


def give_sgd_a_state_function(optimizer: Any) -> None:
    """megatron calls the function that makes an optimizer's state before loading a checkpoint, and SGD has none.

    Mutates the optimizer. Remove when megatron-core checks whether there is one.
    """
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is None:
            part.init_state_fn = lambda optimizer, config=None: None


def keep_one_table(rotary: Any, rows: int) -> None:
    """Makes megatron compute a RoPE table of `rows` positions, or of a longer sequence's. Mutates.

    It computes one for the longest sequence of each micro-batch, and keeps the tables of the last 32 lengths. Remove
    when it keeps one table.
    """
    longest: Callable[..., int] = rotary.get_rotary_seq_len
    rotary.get_rotary_seq_len = lambda *args, **kwargs: max(rows, longest(*args, **kwargs))


@contextlib.contextmanager
def load_numbers_only(on_read: Callable[[], object]) -> Iterator[None]:
    """Inside, `torch.load` opens with `weights_only` whatever the caller passes: UnpicklingError for anything else.

    `on_read` is called before each call, which reads a tensor or a small file. megatron-core passes False for common.pt
    and stored objects. Use from one thread. Remove when it passes True and has signs of life.
    """
    load = torch.load

    def numbers_only(*arguments: Any, **options: Any) -> Any:
        on_read()
        return load(*arguments, **{**options, "weights_only": True})

    torch.load = numbers_only
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        torch.load = load


def _quiet_a_warning() -> None:
    """megatron warns, once a layer, of the unknown `RecomputedActivationMLP`, and treats it as other MLPs.

    Remove when it recognises subclasses.
    """
    layers = logging.getLogger("megatron.core.transformer.transformer_layer")
    layers.addFilter(lambda record: "Unknown MLP type" not in str(record.msg))


def _define_te_general_gemm() -> None:
    """megatron's router defines the name with Transformer Engine only, and reads it always.

    Remove when it defines it always.
    """
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
    _offer_gradient_fusion()
if not HAS_CUDA:
    _replace_cuda_names()
    _import_without_compiler()
_quiet_a_warning()
_define_te_general_gemm()

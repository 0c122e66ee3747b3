"""The extension of TensorRT-LLM's workers: loads the policy's and the drafter's weights from another process.

Imported by name in each worker, in TensorRT-LLM's own environment, where `backends/` is the package `tlt_backends`;
it must not import megatron_tlt. An *entry* is one tensor as plain data: name, dtype, shape, and either `data` (its
bytes), `file` and `offset` (shared memory), or `ipc` (a CUDA handle of the process that trains).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.models.checkpoints.auto_mapper import AutoCheckpointMapper
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

Entry = Mapping[str, Any]
Sums = dict[str, int]
DEVICE = 6  # the place in a handle's arguments that the engine overwrites with its own device


class TltWorkerExtension(WorkerExtension):  # type: ignore[misc]  # of another environment: untyped here
    """The engine's own update of the policy, fed from plain data, and an update of the drafter beside it."""

    def tlt_update(self, entries: Sequence[Entry], verify: bool) -> Sums:
        """Loads some of the policy's tensors under their Hugging Face names.

        Returns the CRC-32 of each as it arrived, if `verify`. The caller finishes with the engine's
        `update_weights(None)`. Mutates the weights.
        """
        sums: Sums = {}
        handles = [(entry["name"], handle_of(entry, sums if verify else None)) for entry in entries]
        self.update_weights({get_device_uuid(self.device_id): handles})
        return sums

    def tlt_reset_prefix_cache(self) -> None:
        """Forgets cached prefixes, before the KV cache's memory is given back. Mutates the engine.

        By the engine's own method: `WorkerExtension` has one of that name in some releases only.
        """
        self.engine.reset_prefix_cache()

    @control_action_decorator  # type: ignore[untyped-decorator]
    def tlt_update_drafter(self, entries: Sequence[Entry], verify: bool) -> Sums:
        """Loads all tensors of the one-model drafter, which `update_weights` leaves out. Raises ValueError.

        In one call, for its fused layers take their parts together; never the embedding, which is the policy's. The
        shapes stay, so that captured graphs hold. Mutates the drafter.
        """
        model = self.engine.model_engine.model
        if getattr(model, "draft_model", None) is None:
            raise ValueError("this engine has no drafter in its model")
        sums: Sums = {}
        weights: dict[str, Any] = {}
        for entry in entries:
            rebuild, args = handle_of(entry, sums if verify else None)
            weights[entry["name"]] = rebuild(*args[:DEVICE], self.device_id, *args[DEVICE + 1 :])
        mapper = AutoCheckpointMapper.get("HF", model.draft_config.pretrained_config.architectures[0])
        mapper.init_model_and_config(model.draft_model, model.draft_config)
        model.load_draft_weights(weights, mapper)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.engine.reset_prefix_cache()
        return sums


def handle_of(entry: Entry, sums: Sums | None) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """(function, arguments) that rebuild a tensor, the form that the engine's `update_weights` takes.

    Calling it notes the tensor's CRC-32 in `sums`. Raises ValueError.
    """
    rebuild = _from_ipc if "ipc" in entry else _from_host
    args = _ipc_args(entry) if "ipc" in entry else (entry, *[None] * DEVICE)

    def load(*given: Any) -> torch.Tensor:
        tensor = rebuild(*given)
        if sums is not None:
            flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            sums[entry["name"]] = zlib.crc32(flat.numpy().tobytes())
        return tensor

    return load, args


def _from_host(entry: Entry, *rest: Any) -> torch.Tensor:
    if "file" in entry:
        with open(entry["file"], "rb") as file:
            file.seek(entry["offset"])
            data = file.read(_num_bytes(entry))
    else:
        data = entry["data"]
    if len(data) != _num_bytes(entry):
        raise ValueError(f"{entry['name']}: {len(data)} bytes came for {entry['dtype']} {entry['shape']}")
    shape = entry["shape"]
    if not data:
        return torch.empty(shape, dtype=_dtype(entry), device=_device(rest[-1]))
    flat = torch.frombuffer(bytearray(data), dtype=_dtype(entry))
    return flat.view(shape).to(_device(rest[-1]))


def _from_ipc(*args: Any) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(*args)  # type: ignore[no-any-return, no-untyped-call]


def _ipc_args(entry: Entry) -> tuple[Any, ...]:
    """The arguments of torch's `rebuild_cuda_tensor`, from the plain data of `weights.ipc_entry`."""
    ipc = entry["ipc"]
    head = (torch.Tensor, torch.Size(entry["shape"]), tuple(ipc["stride"]), ipc["offset"])
    storage = (torch.storage.TypedStorage, _dtype(entry), None)  # type: ignore[attr-defined]
    tail = (
        "handle",
        "storage_bytes",
        "storage_offset",
        "requires_grad",
        "counter",
        "counter_offset",
        "event",
    )
    return (*head, *storage, *(ipc[name] for name in tail), ipc["event_sync"])


def _dtype(entry: Entry) -> torch.dtype:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['name']}: no such dtype: {entry['dtype']!r}")
    return dtype


def _num_bytes(entry: Entry) -> int:
    count: int = torch.Size(entry["shape"]).numel()
    return count * _dtype(entry).itemsize


def _device(device_id: Any) -> torch.device:
    return torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)

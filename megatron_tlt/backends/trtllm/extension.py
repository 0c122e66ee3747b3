"""The extension of TensorRT-LLM's workers: loads the policy's and the drafter's weights from another process.

Imported by name in each worker, in TensorRT-LLM's own environment, where `backends/` is the package `tlt_backends`;
it must not import megatron_tlt.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.models.checkpoints.auto_mapper import AutoCheckpointMapper
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

from ..entries import DEVICE, Location, Sums, checksums, load_tensors


class TrtllmWorkerExtension(WorkerExtension):  # type: ignore[misc]  # of another environment: untyped here
    """The engine's own update of the policy, fed from plain data, and an update of the drafter beside it."""

    def tlt_update(self, location: Location, verify: bool) -> Sums:
        """Loads some of the policy's tensors under their Hugging Face names.

        Returns the CRC-32 of each as it arrived, if `verify`. The caller finishes with the engine's
        `update_weights(None)`. Mutates the weights.
        """
        tensors = load_tensors(location, self.device_id)
        handles = [(name, (_loaded, (tensor, *[None] * DEVICE))) for name, tensor in tensors.items()]
        self.update_weights({get_device_uuid(self.device_id): handles})
        return checksums(tensors) if verify else {}

    def tlt_reset_prefix_cache(self) -> None:
        """Forgets cached prefixes, before the KV cache's memory is given back. Mutates the engine.

        By the engine's own method: `WorkerExtension` has one of that name in some releases only.
        """
        self.engine.reset_prefix_cache()

    @control_action_decorator  # type: ignore[untyped-decorator]
    def tlt_update_drafter(self, location: Location, verify: bool) -> Sums:
        """Loads all tensors of the one-model drafter, which `update_weights` leaves out. Raises ValueError.

        In one call, for its fused layers take their parts together; never the embedding, which is the policy's. The
        shapes stay, so that captured graphs hold. Mutates the drafter.
        """
        model = self.engine.model_engine.model
        if getattr(model, "draft_model", None) is None:
            raise ValueError("this engine has no drafter in its model")
        weights = load_tensors(location, self.device_id)
        sums = checksums(weights) if verify else {}
        mapper = AutoCheckpointMapper.get("HF", model.draft_config.pretrained_config.architectures[0])
        mapper.init_model_and_config(model.draft_model, model.draft_config)
        model.load_draft_weights(weights, mapper)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.engine.reset_prefix_cache()
        return sums


def _loaded(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """The tensor of a handle."""
    return tensor

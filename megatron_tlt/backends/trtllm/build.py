"""Starting a TensorRT-LLM engine for a rank."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.backends.devices import visible_device
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.backends.trtllm.args import Eagle3Files, build_llm_kwargs
from megatron_tlt.backends.trtllm.backend import TrtllmBackend
from megatron_tlt.backends.trtllm.launch import trtllm_launch
from megatron_tlt.data.tokenizer import end_tokens
from megatron_tlt.drafters.checkpoint import write_directory
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.workers.scratch import ScratchDirectory

if TYPE_CHECKING:
    from megatron_tlt.drafters.base import SavedDrafter


def build_backend(options: EngineOptions) -> TrtllmBackend:
    """The engine of this rank, started on its GPU, without the policy's weights (version -1), with the drafter.

    With `rollout.release_cache` it has given its KV cache's memory back. Raises ConfigError, CheckpointError or
    BackendError.
    """
    rollout, model, drafter = options.rollout, options.model, options.drafter
    section = rollout.trtllm
    policy = ModelConfig.from_hf(model.path)
    with closing(ScratchDirectory()) as scratch:  # the engine has read the drafter when it stands
        files = None if drafter is None else _write(drafter, scratch.path / "drafter", DTYPES[rollout.dtype])
        process = EngineProcess(trtllm_launch(section), visible_device(torch.device(options.device), "trtllm"))
        process.start(llm=build_llm_kwargs(rollout, model, process.engine_version, files))
    backend = TrtllmBackend(
        process,
        ServedWeights.of_policy(policy, options.sync.verify),
        options,
        end_tokens(model.path, options.tokenizer),
    )
    if rollout.release_cache:
        with process.closed_on_error():
            backend.release()  # until the first rollout
    return backend


def _write(drafter: SavedDrafter, folder: Path, dtype: torch.dtype) -> Eagle3Files:
    """The drafter as the engine reads it at its start. Raises ConfigError for a form that it does not have."""
    files = KINDS[drafter.config.kind].engine_files(drafter.config, drafter.weights, "trtllm", dtype)
    write_directory(folder, files.tensors, files.json)
    return Eagle3Files(folder, tuple(files.json["speculative.json"]["eagle3_layers_to_capture"]))

"""Starting a TensorRT-LLM engine for a rank."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.backends.devices import visible_device
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.backends.transport import open_transport
from megatron_tlt.backends.trtllm.args import Eagle3Files, build_llm_kwargs
from megatron_tlt.backends.trtllm.backend import TrtllmBackend
from megatron_tlt.backends.trtllm.launch import launch_of
from megatron_tlt.drafter.checkpoint import write_directory
from megatron_tlt.drafter.export.engines import engine_files
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.sync.served_weights import ServedWeights

if TYPE_CHECKING:
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection, SyncSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.drafter.checkpoint import SavedDrafter


def build_trtllm(
    rollout: RolloutSection,
    model: ModelSection,
    sync: SyncSection,
    *,
    device: torch.device | str,
    tokenizer: HFTokenizer | None = None,
    drafter: SavedDrafter | None = None,
    keeps_tables: bool = False,
) -> TrtllmBackend:
    """The engine of this rank, started on its GPU, without the policy's weights (version -1), with `drafter`.

    With `rollout.trtllm.sleep` it has given its KV cache's memory back. `keeps_tables`: see `RemoteBackend`. The
    settings have passed `config.checks.backend`. Raises ConfigError, CheckpointError or BackendError.
    """
    section, config = rollout.trtllm, ModelConfig.from_hf(model.path)
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        files = None if drafter is None else _write(drafter, folder / "drafter", DTYPES[rollout.dtype])
        try:
            kwargs = build_llm_kwargs(rollout, model, files)
        except ValueError as error:
            raise ConfigError.of("rollout.trtllm", section.engine, str(error)) from error
        process = EngineProcess(launch_of(section), visible_device(torch.device(device), "trtllm"))
        with ExitStack() as on_error:
            on_error.callback(process.close)
            transport = open_transport(section.transport, process)
            process.call("start", llm=kwargs, patience=section.start_s)  # it has read the drafter when it stands
            on_error.pop_all()
    weights = ServedWeights(
        config.parameter_shapes(), ("lm_head.weight",) if config.tie_word_embeddings else (), sync.verify
    )
    backend = TrtllmBackend(
        process,
        transport,
        weights,
        rollout,
        max_context=model.max_context,
        eos_token_ids=sorted({*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}),
        drafter_names=frozenset(() if drafter is None else drafter.weights),
        tokenizer=tokenizer,
        keeps_tables=keeps_tables,
    )
    if section.sleep != "none":
        backend.release()  # the engine took its KV cache at the start; the policy, built next, needs that memory
    return backend


def _write(drafter: SavedDrafter, folder: Path, dtype: torch.dtype) -> Eagle3Files:
    """The drafter as the engine reads it at its start. Raises ConfigError for a form that it does not have."""
    files = engine_files(drafter, "trtllm", dtype)
    write_directory(folder, files.tensors, files.json)
    return Eagle3Files(folder, tuple(files.json["speculative.json"]["eagle3_layers_to_capture"]))

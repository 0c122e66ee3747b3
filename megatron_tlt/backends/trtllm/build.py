"""Starting a TensorRT-LLM engine for a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from megatron_tlt.backends.devices import visible_device
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.backends.transport import open_transport
from megatron_tlt.backends.trtllm.args import build_llm_kwargs
from megatron_tlt.backends.trtllm.backend import TrtllmBackend
from megatron_tlt.backends.trtllm.launch import launch_of
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.sync.served_weights import ServedWeights

if TYPE_CHECKING:
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection, SyncSection
    from megatron_tlt.interfaces import Tokenizer


def build_trtllm(
    rollout: RolloutSection,
    model: ModelSection,
    sync: SyncSection,
    *,
    device: torch.device | str,
    tokenizer: Tokenizer | None = None,
    keeps_tables: bool = False,
) -> TrtllmBackend:
    """The engine of this rank, started on its GPU, without the policy's weights (version -1).

    With `rollout.trtllm.sleep` it has given its KV cache's memory back. `keeps_tables`: see `RemoteBackend`. The
    settings have passed `config.checks.backend`. Raises ConfigError, CheckpointError or BackendError.
    """
    section = rollout.trtllm
    config = ModelConfig.from_hf(model.path)
    try:
        kwargs = build_llm_kwargs(rollout, model)
    except ValueError as error:
        raise ConfigError.of("rollout.trtllm", section.engine, str(error)) from error
    weights = ServedWeights(
        config.parameter_shapes(), ("lm_head.weight",) if config.tie_word_embeddings else (), sync.verify
    )
    drafter = section.drafter_path
    names = frozenset() if drafter is None else drafter_names(Path(drafter).resolve())
    ends = sorted({*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())})
    process = EngineProcess(launch_of(section), visible_device(torch.device(device), "trtllm"))
    started = False
    try:
        transport = open_transport(section.transport, process)
        process.call("start", llm=kwargs, patience=section.start_s)
        started = True
    finally:
        if not started:
            process.close()
    backend = TrtllmBackend(
        process,
        transport,
        weights,
        rollout,
        max_context=model.max_context,
        eos_token_ids=ends,
        drafter_names=names,
        tokenizer=tokenizer,
        keeps_tables=keeps_tables,
    )
    if section.sleep != "none":
        backend.release()  # the engine took its KV cache at the start; the policy, built next, needs that memory
    return backend


def drafter_names(directory: Path) -> frozenset[str]:
    """Tensors of the drafter that the engine starts with, and that a push must bring again. Raises CheckpointError.

    The embedding is not among them: the engine takes the policy's.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors of a drafter")
    names: set[str] = set()
    for path in files:
        try:
            with safe_open(str(path), "pt") as file:
                names.update(file.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return frozenset(name for name in names if "embed" not in name)

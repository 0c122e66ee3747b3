"""Starting a vLLM engine for a rank."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.backends.devices import visible_device
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.process import HEARTBEAT_S, EngineProcess
from megatron_tlt.backends.vllm.args import (
    engine_args,
    launcher_variables,
    longest_draft,
    speculative_config,
)
from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.backends.vllm.launch import vllm_launch
from megatron_tlt.data.tokenizer import end_tokens
from megatron_tlt.drafters.checkpoint import write_directory
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.experts import route_type
from megatron_tlt.rollout.kv_cache import choose_num_blocks
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.workers.scratch import ScratchDirectory

_log = logging.getLogger(__name__)
_LEAST_CAPABILITY = (8, 0)  # of a GPU, for vLLM's batch-invariant mode


def build_backend(options: EngineOptions) -> VllmBackend:
    """The engine of this rank, or its part of one of `rollout.tp` ranks, started on its device, without weights
    (version -1). Collective among those ranks.

    Raises ConfigError, CheckpointError or BackendError.
    """
    rollout, model, drafter = options.rollout, options.model, options.drafter
    device = torch.device(options.device)
    policy = ModelConfig.from_hf(model.path)
    assert (drafter is not None) == (rollout.speculation.trained is not None)
    _require_capability(rollout.numerics, device)
    store: dist.TCPStore | None = None
    with closing(ScratchDirectory()) as scratch:  # the engine has read the drafter when it stands
        arguments = _arguments(options, scratch.path)
        variables = visible_device(device, "vllm")
        if (tp := options.tp) is not None and tp.size > 1:
            store = _store() if tp.rank == 0 else None
            port = tp.broadcast_object(None if store is None else store.port)
            assert port is not None
            variables |= launcher_variables(tp.rank, tp.size, port)
        process = EngineProcess(vllm_launch(rollout, device.type), variables)
        process.start(
            llm=arguments,
            hidden_bytes=rollout.vllm.hidden_mib << 20 if options.keep_layers is not None else 0,
            max_len=options.max_request,
            max_requests=rollout.max_running_requests,
            speculation=rollout.speculation.model_dump(),
            routed_experts=route_type(policy.num_experts) if options.keep_routed_experts else None,
            verify_rows=rollout.verify_rows if options.takes_drafts else None,
            directory=str(process.shared.path),
            tokenizer=str(Path(model.tokenizer_path).resolve()),
            stop=list(rollout.stop),
            beat_s=HEARTBEAT_S,
        )
    backend = VllmBackend(
        process,
        ServedWeights.of_policy(policy, options.sync.verify),
        options,
        end_tokens(model.path, options.tokenizer),
        experts_per_token=policy.num_experts_per_tok,
        store=store,
    )
    with process.closed_on_error():
        backend.release()  # until the first rollout
    return backend


def _store() -> dist.TCPStore:
    """Where the processes of one engine meet. It listens from now on: until vLLM's first rank would, half a minute
    later, another engine of this machine could take a port that is only free.
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _require_capability(numerics: str, device: torch.device) -> None:
    """Raises ConfigError for a GPU on which vLLM's batch-invariant mode does not hold, since vLLM starts there, too."""
    if numerics == "invariant" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        allowed = "needs a GPU of compute capability 8.0 or above with rollout.backend: vllm"
        raise ConfigError.of("rollout.numerics", numerics, allowed)


def _arguments(options: EngineOptions, folder: Path) -> dict[str, Any]:
    """The engine's arguments; writes the drafter into `folder`, which the engine reads at its start."""
    rollout, model, drafter, block = options.rollout, options.model, options.drafter, options.rollout.vllm.kv_block
    device = torch.device(options.device)
    policy = ModelConfig.from_hf(model.path)
    cached = policy.num_layers * policy.num_kv_heads * policy.head_dim // rollout.tp
    is_block = False
    if drafter is not None:
        made, kind = drafter.config, KINDS[drafter.config.kind]
        files = kind.vllm_files(made, drafter.weights, DTYPES[rollout.dtype])
        write_directory(folder, files.tensors, files.json)
        is_block = kind.draft_length(made) is not None
        cached += kind.cached_layers(made) * made.layer.num_kv_heads * made.layer.head_dim // rollout.tp
    # Drafts lie behind the last token; vLLM verifies zeros for all requests in a step where those of one do not fit.
    # It counts a block's anchor, too.
    shape = None if drafter is None else drafter.config
    behind = longest_draft(rollout, shape, options.takes_drafts) + is_block
    context, most = options.max_request + behind, policy.max_position_embeddings
    if context > most and behind:
        text = "once a running response is within %d tokens of the model's last position (%d), vLLM drafts for none"
        _log.info(text, behind, most)
    context = min(context, most)
    block_bytes = 2 * cached * DTYPES[rollout.dtype].itemsize * block
    blocks = choose_num_blocks(
        block_bytes,
        block_size=block,
        max_running=rollout.max_running_requests,
        max_context=context,
        budget_bytes=options.kv_cache_bytes or rollout.kv_cache_bytes,
        device=device,
        local_ranks=options.local_ranks,
        longest_request=context,  # vLLM holds one block back, and starts only if the rest has room for this
    )
    speculation = speculative_config(rollout, shape, folder, options.takes_drafts)
    model = model.model_copy(update={"max_context": context})
    return engine_args(rollout, model, blocks * block_bytes, speculation, device.type)

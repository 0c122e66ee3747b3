"""Building the embedded rollout backend from a configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.checks.rollout import check_positions
from megatron_tlt.config.checks.speculation import check_speculation
from megatron_tlt.config.rollout import KV_BLOCK
from megatron_tlt.data.tokenizer import end_tokens
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import DTYPES, empty_routed_experts
from megatron_tlt.models.decoders.factory import build_decoder, sample_kernel
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.engine import Engine, GraphBudget
from megatron_tlt.rollout.kv_cache import choose_num_blocks
from megatron_tlt.rollout.paged_hidden_states import page_bytes
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.speculation.build import Drafting
from megatron_tlt.rollout.speculation.history import ResponseHistory
from megatron_tlt.rollout.speculation.pre_rollouts import LONGEST
from megatron_tlt.sync.served_weights import ServedWeights

if TYPE_CHECKING:
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.drafters.decoder import DrafterDecoder
    from megatron_tlt.models.decoders.base import Decoder
    from megatron_tlt.rollout.sampler import NativeSample

# Of a prompt, the suffix drafter reads the best responses of its last epochs: the policy moves away from older ones.
_HISTORY_EPOCHS = 2
_HISTORY_RESPONSES = 8


def build_backend(options: EngineOptions) -> EmbeddedBackend:
    """The rollout engine of this rank, without weights. Collective in the tensor-parallel group. Raises ConfigError,
    CheckpointError or BackendError.
    """
    rollout, model, tp, drafter = options.rollout, options.model, options.tp, options.drafter
    device, threads = torch.device(options.device), cpu_threads()
    config = ModelConfig.from_hf(model.path)
    problems = [
        *check_positions(model.max_context, config.max_position_embeddings),
        *check_speculation(rollout.speculation, drafter is not None),
    ]
    if problems:
        raise ConfigError(problems)
    assert rollout.tp == (1 if tp is None else tp.size), "the caller made the group"
    if rollout.speculation.trained and drafter is None:
        assert rollout.speculation.drafter_path is not None  # `check_speculation`
        drafter = load_drafter(rollout.speculation.drafter_path, config, rollout.speculation)
    decoder = build_decoder(
        replace(config, max_position_embeddings=model.max_context),  # the rotary table's length: no request is longer
        device,
        DTYPES[rollout.dtype],
        rollout.kernels,
        threads,
        tp,
        rollout.numerics,
        (options.keep_layers or ()) if drafter is None else drafter.config.aux_layers,
    )
    history = _history(rollout)
    drafter_decoder = None
    if rollout.speculation.trained and drafter is not None:
        drafter_decoder = KINDS[drafter.config.kind].build_decoder(decoder, drafter.config, threads)
        drafter_decoder.load_weights(drafter.weights.items())
    num_blocks = choose_num_blocks(
        _block_bytes(KV_BLOCK, decoder, drafter_decoder, options.keep_layers is not None),
        block_size=KV_BLOCK,
        max_running=rollout.max_running_requests,
        max_context=model.max_context,
        budget_bytes=options.kv_cache_bytes or rollout.kv_cache_bytes,
        device=device,
        local_ranks=options.local_ranks,
        longest_request=options.longest_request,
    )
    if tp is not None and tp.size > 1 and options.kv_cache_bytes is None:
        # Ranks see different amounts of free memory, and their schedulers must decide alike; a plan is the same on all.
        num_blocks = int(tp.all_gather(torch.tensor([num_blocks], device=device)).min())
    graphs = _graphs(options, decoder)
    engine = Engine(
        decoder,
        SchedulerLimits(rollout.max_running_requests, rollout.max_batched_tokens, model.max_context, config.vocab_size),
        num_blocks,
        KV_BLOCK,
        tokenizer=options.tokenizer,
        eos_token_ids=end_tokens(model.path, options.tokenizer),
        tp=tp,
        native_sample=_native_sample(decoder, threads),
        drafting=Drafting(rollout.speculation, rollout.verify_rows, drafter_decoder, history),
        graphs=graphs,
        sample_kernel=sample_kernel(rollout.kernels, device),
    )
    if graphs is not None:
        engine.capture_graphs(graphs.rows_each, rollout.release_cache and device.type == "cuda")
    if options.keep_routed_experts:
        engine.record_routed_experts()
    return EmbeddedBackend(
        engine,
        ServedWeights.of_policy(config, options.sync.verify),
        history=history,
        release_cache=rollout.release_cache,
    )


def _graphs(options: EngineOptions, decoder: Decoder) -> GraphBudget | None:
    """Captured graphs for decoding on CUDA; None where the configuration or the device excludes them."""
    rollout = options.rollout
    if not (rollout.graph_memory_mib and isinstance(decoder, TorchDecoder) and decoder.paged is not None):
        return None
    rows_each = max(rollout.speculation.rows_each, 1 + LONGEST if options.takes_drafts else 1)
    return GraphBudget(decoder, rollout.graph_memory_mib << 20, rollout.verify_rows, rows_each)


def _history(rollout: RolloutSection) -> ResponseHistory | None:
    """Earlier responses with their tokens, where the suffix drafter reads them."""
    if rollout.speculation.drafter != "suffix":
        return None
    return ResponseHistory(_HISTORY_EPOCHS, _HISTORY_RESPONSES, rollout.speculation.suffix.history_mib)


def _block_bytes(size: int, decoder: Decoder, drafter_decoder: DrafterDecoder | None, keep_hidden_states: bool) -> int:
    """Memory of one block: the policy's cache, the drafter's, the hidden states that it reads or that are kept, and the
    tokens' experts (well under 1 %, whether or not they are recorded).
    """
    total = decoder.kv_bytes_per_block(size) + empty_routed_experts(size, decoder.config).nbytes
    if drafter_decoder is not None:
        total += drafter_decoder.kv_bytes_per_block(size)
    if drafter_decoder is not None or keep_hidden_states:
        total += page_bytes(size, decoder.state_size, decoder.dtype)
    return total


def _native_sample(decoder: Decoder, threads: int) -> NativeSample | None:
    """The C sampler, where the decoder is the native one (its library is built already)."""
    if decoder.kind != "native":
        return None
    from megatron_tlt.models.decoders.native.decoder import keyed_sample

    return partial(keyed_sample, threads=threads, bf16=decoder.dtype == torch.bfloat16)

"""Every private function and field of vLLM that the plugin uses, for vLLM 0.32 (model runner V1).

vLLM promises none of these names. `differences` compares each with its recorded signature before an engine starts;
another version needs a look at every function of this file. A comment "remove when" says what in vLLM would make a part
unnecessary; all that only reads the runner's state goes with a public interface for samplers.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")
SERIES = "0.32."
# (module, name, its parameters): functions that are called, replaced, or called back.
SIGNATURES = (
    ("v1.worker.gpu_model_runner", "GPUModelRunner._sample", "self logits spec_decode_metadata"),
    ("v1.worker.gpu_model_runner", "GPUModelRunner.get_model", "self"),
    ("v1.worker.gpu_worker", "Worker.get_draft_model", "self"),
    ("v1.core.sched.interface", "SchedulerInterface.has_requests", "self"),
    (
        "v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._sample_draft_tokens",
        "self hidden_states sampling_metadata",
    ),
    (
        "v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        (
            "self num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
            "token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs "
            "num_rejected_tokens_gpu slot_mappings"
        ),
    ),
    (
        "v1.spec_decode.dflash",
        "DFlashProposer.set_inputs_first_pass",  # and the next six: `block_drafter`
        (
            "self target_token_ids next_token_ids target_positions target_hidden_states token_indices_to_sample cad "
            "num_rejected_tokens_gpu"
        ),
    ),
    (
        "model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._project_context_kv",
        "self context_states num_ctx num_layers num_kv_heads head_dim",
    ),
    ("model_executor.models.qwen3_dflash", "DFlashQwen3Model._normalize_context_k", "self all_k"),
    (
        "model_executor.models.qwen3_dflash",
        "DFlashQwen3Model.precompute_and_store_context_kv",
        "self context_states context_positions context_slot_mapping",
    ),
    ("model_executor.models.qwen3_dspark", "Qwen3DSparkForCausalLM.compute_draft_logits", "self hidden_states"),
    ("model_executor.models.qwen3_dspark", "Qwen3DSparkForCausalLM.markov_embed", "self token_ids"),
    ("model_executor.models.qwen3_dspark", "Qwen3DSparkForCausalLM.markov_bias", "self markov_embed"),
    ("v1.engine.llm_engine", "LLMEngine.step", "self"),
    ("v1.engine.llm_engine", "LLMEngine.abort_request", "self request_ids internal"),
    ("v1.engine.llm_engine", "LLMEngine.sleep", "self level mode"),
    ("v1.engine.llm_engine", "LLMEngine.release_kv_cache_memory", "self"),
    ("v1.engine.llm_engine", "LLMEngine.wake_up", "self tags"),
    ("v1.engine.llm_engine", "LLMEngine.collective_rpc", "self method timeout args kwargs"),
    (
        "model_executor.models.interfaces",
        "EagleModelMixin._maybe_add_hidden_state",  # what `states` joins
        "self aux_hidden_states layer_idx hidden_states residual",
    ),
    ("model_executor.model_loader.reload", "initialize_layerwise_reload", "model"),
    ("model_executor.model_loader.reload", "finalize_layerwise_reload", "args kwargs"),
    ("model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "layer remove_weight"),
    ("model_executor.layers.fused_moe.routed_experts", "RoutedExperts.load_weights", "self weights"),
    (
        "model_executor.layers.fused_moe.routed_experts_capturer",
        "bind_routed_experts_capturer",
        "model capturer",
    ),
    (
        "model_executor.layers.fused_moe.routed_experts_capturer",
        "RoutedExpertsCapturer",
        "max_num_batched_tokens vllm_config",
    ),
    (
        "model_executor.layers.fused_moe.routed_experts_capturer",
        "RoutedExpertsCapturer.capture",  # `Chosen` stands for it
        "self layer_id topk_ids",
    ),
    ("v1.worker.gpu_worker", "Worker.load_model", "self load_dummy_weights"),
    (
        "model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod._setup_kernel",  # what `_make_kernels_anew` makes happen
        "self layer w13 w2",
    ),
    ("distributed.parallel_state", "get_tp_group", ""),
    ("distributed.parallel_state", "GroupCoordinator.broadcast_object", "self obj src"),
    ("model_executor.models.utils", "get_draft_quant_config", "vllm_config"),
    ("model_executor.models.utils", "maybe_prefix", "prefix name"),
)
# (module, class, its fields): what is read from, or built.
FIELDS = (
    ("v1.outputs", "SamplerOutput", "sampled_token_ids logprobs_tensors"),
    (
        "v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        "draft_token_ids num_draft_tokens logits_indices target_logits_indices bonus_logits_indices",
    ),
)
# Of stacks of experts, and of the router: how vLLM's Mixtral names them; its other models name them as we do.
_MIXTRAL = {".mlp.": ".block_sparse_moe.", "experts.gate_up_proj": "experts.w13", "experts.down_proj": "experts.w2"}


def differences(version: str) -> list[str]:
    """What of vLLM is not as recorded here; empty: the plugin fits."""
    if not version.startswith(SERIES):
        return [f"version {version}: the plugin is written for {SERIES}x"]
    found = []
    for module, name, expected in SIGNATURES:
        try:
            actual = " ".join(inspect.signature(_find(module, name)).parameters)
        except (ImportError, AttributeError) as error:
            found.append(f"{module}.{name}: {error}")
            continue
        if actual != expected:
            found.append(f"{module}.{name} has the parameters ({actual}), not ({expected})")
    for module, name, expected in FIELDS:
        missing = set(expected.split()) - set(getattr(_find(module, name), "__dataclass_fields__", ()))
        if missing:
            found.append(f"{module}.{name} has no {', '.join(sorted(missing))}")
    return found


def _find(module: str, name: str) -> Any:
    found: Any = import_module(f"vllm.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def first_ranks(value: T) -> T:
    """The value of the engine's first rank, on all of its tensor-parallel ranks, which call this in one order. Through
    shared memory; a wait for the first rank, no collective of the device.
    """
    from vllm.distributed.parallel_state import get_tp_group

    first: T = get_tp_group().broadcast_object(value)
    return first


def has_requests(engine: Any) -> bool:
    """Whether the scheduler of an engine in this process still has requests, or counts some that have ended."""
    has: bool = engine.engine_core.engine_core.scheduler.has_requests()
    return has


# Remove when CPU workers of an external launcher get names of their own for shared memory.
def reduce_by_gloo() -> None:
    """Tensor-parallel workers on CPUs reduce by gloo, not in shared memory: its name would be that of every engine on
    this machine, and its ranks spin. Workers that do not share a name use gloo. On GPUs nothing changes.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import cpu_worker

    initialise = cpu_worker.init_worker_distributed_environment

    def initialise_apart(config: Any, rank: int, *args: Any) -> None:
        os.environ["VLLM_DIST_IDENT"] = str(rank)
        initialise(config, rank, *args)

    cpu_worker.init_worker_distributed_environment = initialise_apart


# -- the model runner's batch ---------------------------------------------------------------------------------


def request_ids(runner: Any) -> list[str]:
    """Internal ids of the requests of the step under way, by row."""
    batch = runner.input_batch
    return list(batch.req_ids[: batch.num_reqs])


def step_tokens(runner: Any) -> int:
    """Most tokens that the scheduler gives a step."""
    most: int = runner.vllm_config.scheduler_config.max_num_scheduled_tokens
    return most


def extra_args(runner: Any, request: str) -> dict[str, Any]:
    """`SamplingParams.extra_args` of a request."""
    return dict(runner.requests[request].sampling_params.extra_args)


def output_lengths(runner: Any) -> np.ndarray:
    """Output tokens of each row before this step, int64 [B]; 0 for one in the middle of its prompt."""
    batch = runner.input_batch
    rows = slice(0, batch.num_reqs)
    done = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
    lengths: np.ndarray = np.maximum(done, 0).astype(np.int64)
    return lengths


def prompt_tokens(runner: Any, request: str) -> list[int]:
    """A request's prompt."""
    return list(runner.requests[request].prompt_token_ids)


def max_tokens(runner: Any, request: str) -> int:
    """Most tokens of a request's output."""
    most: int = runner.requests[request].sampling_params.max_tokens
    return most


def is_drawn(runner: Any) -> np.ndarray:
    """Bool [B]: rows whose sample counts; not those in the middle of their prompt."""
    drawn: np.ndarray = ~runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return drawn


def row_starts(runner: Any) -> np.ndarray:
    """Where the rows of a forward begin among its tokens, int [B + 1]."""
    starts: np.ndarray = runner.query_start_loc.np[: runner.input_batch.num_reqs + 1]
    return starts


def drafts(metadata: Any) -> tuple[np.ndarray, Tensor]:
    """Drafted tokens of each row, int [B], and the tokens, row by row, int32 [sum] on the device."""
    return np.asarray(metadata.num_draft_tokens, np.int64), metadata.draft_token_ids


def sampler_output(tokens: Tensor) -> Any:
    """What `_sample` returns: tokens int32 [B, 1 + longest draft], -1 behind a row's last one."""
    from vllm.v1.outputs import SamplerOutput

    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


# -- replaced functions ---------------------------------------------------------------------------------------


# Remove when vLLM takes a sampler that sees the draft tokens of a step.
def replace_sampler(runner: Any, sample: Callable[[Tensor, Any], Any]) -> None:
    """`sample(logits [T, V], metadata)` instead of vLLM's sampler and rejection sampler."""
    runner._sample = sample


# Remove when vLLM takes a sampler for drafters, and a draft length for each step.
def replace_draft_sampler(
    runner: Any,
    begin: Callable[[], int],
    sample: Callable[[Tensor], Tensor],
    end: Callable[[Tensor], Tensor | list[list[int]]],
) -> bool:
    """`sample(logits [B, V])` instead of the drafter's, `begin()` tokens for each row, perhaps 0; vLLM gets what
    `end(drafts [B, K])` makes of each proposal. A drafter of blocks fills them whole; its tokens behind those wanted
    are cut.

    False: the drafter has no logits (suffix), or there is none.
    """
    drafter: Any = getattr(runner, "drafter", None)
    if not hasattr(drafter, "_sample_draft_tokens"):
        return False
    propose, whole_block = drafter.propose, drafter.num_speculative_tokens * drafter.parallel_drafting

    def begin_and_propose(num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Tensor | list[list[int]]:
        drafter.tlt_wanted = wanted = begin()
        drafts: Tensor = propose(whole_block if wanted and whole_block else wanted, *args, **kwargs)
        return end(drafts[:, :wanted])

    def sample_draft(hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        return sample(drafter.model.compute_logits(hidden_states)), None

    drafter.propose, drafter._sample_draft_tokens = begin_and_propose, sample_draft
    if whole_block:
        from megatron_tlt.backends.vllm.plugin.block_drafter import fill_blocks

        fill_blocks(drafter, sample)
    return True


# Remove when vLLM hands out hidden states of all tokens and not of the last one only.
def hook_forward(runner: Any, seen: Callable[[Any, Tensor], None]) -> None:
    """Calls `seen(output, positions [T])` after each forward of the policy; `states` reads the output."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if runner.input_batch.num_reqs:  # not a warm-up
            seen(output, kwargs["positions"])

    runner.get_model().register_forward_hook(hook, with_kwargs=True)


def states(output: Any) -> Tensor:
    """A forward's hidden states [T, H] behind the final norm; for eagle3 [T, 4 H], the outputs of its three layers
    before them.
    """
    if not isinstance(output, tuple):
        final: Tensor = output
        return final
    final, layers = output
    return torch.cat([*layers, final], dim=-1)


# Remove when a request's output names the experts of its own tokens for every kernel.
def bind_routers_at_load() -> None:
    """From now on a worker that has loaded its model records what its routers choose, as `tlt_chosen`. Before graphs
    are captured: they write the record when they are replayed. Raises ValueError, at the load, for kernels that do not
    record their choice.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    def load_and_bind(worker: Any, **kwargs: Any) -> None:
        load_model(worker, **kwargs)
        most = worker.vllm_config.scheduler_config.max_num_batched_tokens
        worker.tlt_chosen = Chosen(RoutedExpertsCapturer(most, worker.vllm_config))
        bind_routed_experts_capturer(worker.model_runner.get_model(), worker.tlt_chosen)

    Worker.load_model = load_and_bind


class Chosen:
    """The experts that each layer chose in the last forward, in a buffer of vLLM's [T, layers, k], at one address."""

    def __init__(self, capturer: Any) -> None:
        self._capturer = capturer
        self._layers: set[int] = set()  # with experts

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """vLLM calls it in a layer's forward, but not where a graph of it is replayed."""
        self._layers.add(layer_id)
        self._capturer.capture(layer_id, topk_ids)

    def of(self, output: Any, dtype: torch.dtype) -> Tensor:
        """Of the tokens of a forward with this output: [T, layers with experts * k], ascending in a layer, on the
        host.
        """
        rows = len(output[0] if isinstance(output, tuple) else output)
        ids = self._capturer.device_buffer[:rows, sorted(self._layers)]
        return ids.sort(-1).values.flatten(1).to("cpu", dtype)


# -- weights --------------------------------------------------------------------------------------------------


# Remove when vLLM has a public call that reloads weights from tensors, part by part.
def begin_reload(worker: Any, model: nn.Module) -> None:
    """Every layer waits for its weights; when the last one has come it is processed into the tensors that serve."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    _make_kernels_anew(model)
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)


def load(worker: Any, model: Any, tensors: list[tuple[str, Tensor]]) -> None:
    """Loads some tensors under Hugging Face names, or ours for stacks of experts, which vLLM's loader takes."""
    from vllm.config import set_current_vllm_config

    is_mixtral = model.config.model_type == "mixtral"
    named = ((_mixtral_name(name) if is_mixtral else name, tensor) for name, tensor in tensors)
    with set_current_vllm_config(worker.vllm_config):
        model.load_weights(named)


def end_reload(worker: Any, model: Any, is_draft: bool) -> None:
    """Ends a reload. Layers without new weights keep theirs. Packs a tied head's copy for CPUs again."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    config = worker.model_config
    if is_draft:
        config = worker.vllm_config.speculative_config.draft_model_config
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, config)
        _pack_tied_head(worker.model_runner.get_model())


def draft_model(worker: Any) -> Any:
    """The drafter's model; None for one without weights."""
    return getattr(getattr(worker.model_runner, "drafter", None), "model", None)


# Remove when a layer-wise reload packs a tied head on CPUs.
def _pack_tied_head(model: Any) -> None:
    """On CPUs a tied LM head computes with a packed copy of the embedding, which a reload leaves as it was."""
    head, table = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
    if head is None or table is None or head.weight.device.type != "cpu":
        return
    if head.weight.data_ptr() == table.weight.data_ptr():
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


# Remove when vLLM's loader of Mixtral takes the names of a stack of experts.
def _mixtral_name(name: str) -> str:
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


# Remove when a layer-wise reload packs experts on CPUs.
def _make_kernels_anew(model: nn.Module) -> None:
    """On CPUs experts compute with packed weights, and vLLM packs them only where it makes a layer's kernel. Without
    its kernel a layer gets one with the weights that are loaded next.
    """
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "w13_weight") and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel = None

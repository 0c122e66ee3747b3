"""The megatron-core GPTModel of a Hugging Face architecture, from building blocks; never `megatron.training`.

Legend: T packed rows, N response rows, V vocabulary columns of this TP rank.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tlt.actor.attention import SDPACoreAttention, rotation
from megatron_tlt.actor.compat import HAS_CUDA, cpu_as_cuda, current_device, keep_one_table
from megatron_tlt.actor.context_parallel import GatheredKeysAttention
from megatron_tlt.actor.elementwise import RMSNorm, swiglu
from megatron_tlt.actor.experts import ExpertLayer, GroupedExperts, RoutedLayer, expert_config
from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.actor.hf_names import adapter_slots, slots
from megatron_tlt.actor.lora import AdaptedColumnLinear, AdaptedRowLinear, freeze_base, without_adapters
from megatron_tlt.actor.microbatch import MicroBatch, recorded_routed_experts
from megatron_tlt.actor.recompute import RecomputedActivationMLP
from megatron_tlt.actor.routing import Router, Routing
from megatron_tlt.actor.weights import mark_partial, mark_shards
from megatron_tlt.config.actor import ActorSection, LoraSection
from megatron_tlt.config.checks.layout import local_recompute
from megatron_tlt.config.planning.policy import rotation_rows
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.decoders.torch.layers import inverse_frequencies
from megatron_tlt.models.hf.config import ModelConfig

# isort: split
# megatron comes after compat.
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import (
    ModuleSpec,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

if TYPE_CHECKING:
    from megatron_tlt.actor.hidden_states import ForwardStateCollector


def uses_transformer_engine(actor: ActorSection) -> bool:
    """Whether `layer_spec` resolves to Transformer Engine here: auto does where its attention takes packed rows. Raises
    ConfigError if it is configured and missing, or has no kernel for packed rows.
    """
    if actor.layer_spec == "local":
        return False
    is_installed = HAS_CUDA and importlib.util.find_spec("transformer_engine") is not None
    takes_rows = is_installed and _has_packed_attention()
    if actor.layer_spec == "auto":
        return takes_rows and actor.dtype == "bf16"
    if not is_installed:
        allowed = "needs CUDA and the package transformer_engine; local or auto"
        raise ConfigError.of("actor.layer_spec", actor.layer_spec, allowed)
    if not takes_rows and importlib.util.find_spec("flash_attn") is None:
        allowed = "needs the package flash_attn on this GPU, whose cuDNN takes no packed rows; local or auto"
        raise ConfigError.of("actor.layer_spec", actor.layer_spec, allowed)
    return True


def _has_packed_attention() -> bool:
    """Whether Transformer Engine 2.9 to 2.11 has an attention kernel for packed rows (thd) in bf16 on this GPU.

    That is cuDNN's, from compute capability 9.0 on and not on 12.x; its backward is not deterministic on 10.x
    (`get_attention_backend`). The package flash_attn would add others: with it, `layer_spec: transformer_engine`.
    """
    major, _ = torch.cuda.get_device_capability()
    return major == 9 or (major == 10 and not torch.are_deterministic_algorithms_enabled())


def kind_of_layers(actor: ActorSection) -> str:
    """In words, with what of `recompute_modules` it leaves out. Raises ConfigError where that is all of them, and as
    `uses_transformer_engine`.
    """
    if uses_transformer_engine(actor):
        return "Transformer Engine's"
    if problems := list(local_recompute(actor)):
        raise ConfigError(problems)
    keeps = actor.recompute == "selective" and "layernorm" in actor.recompute_modules
    return "megatron-core's local ones" + ", which keep their norms (actor.recompute_modules: layernorm)" * keeps


def packed_format(actor: ActorSection) -> str:
    """megatron's qkv_format: the local layers take packed rows through the plain path (see attention.py)."""
    return "thd" if uses_transformer_engine(actor) else "sbhd"


def _recompute(actor: ActorSection) -> dict[str, Any]:
    if actor.recompute == "none":
        return {}
    if actor.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    # `mlp_act` is in the layer's spec; megatron redoes norms only where Transformer Engine is installed.
    left_out = {"mlp_act"} if uses_transformer_engine(actor) else {"mlp_act", "layernorm"}
    modules = [name for name in actor.recompute_modules if name not in left_out]
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _fusions(actor: ActorSection) -> dict[str, bool]:
    """megatron's fused operations. RoPE and SwiGLU of the local layers are in `attention.py` and `elementwise.py`.

    Transformer Engine's RoPE reads the sequences' bounds on the device, and rotates in fp32 as the engine does;
    megatron's own brings them to the host, in every layer. Of `tp_comm_overlap` nothing: its buffers have one fixed
    size, and packed micro-batches do not.
    """
    engine = uses_transformer_engine(actor)
    return {
        "apply_rope_fusion": engine,
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": HAS_CUDA,
        "gradient_accumulation_fusion": True,  # of Transformer Engine, apex, or `compat.py`
        "use_te_activation_func": not engine,  # takes the spec's, `swiglu`
    }


def transformer_config(config: ModelConfig, actor: ActorSection) -> TransformerConfig:
    """megatron's dataclass for this architecture and layout."""
    dtype = DTYPES[actor.dtype]
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=actor.tp,
        pipeline_model_parallel_size=actor.pp,
        context_parallel_size=actor.cp,
        # megatron indexes a list by layers from 1: a string
        cp_comm_type=actor.cp_comm(uses_transformer_engine(actor)) if actor.cp > 1 else None,
        sequence_parallel=actor.sequence_parallel,
        perform_initialization=False,  # every tensor is loaded or drawn by name, the same in every layout
        use_cpu_initialization=not HAS_CUDA,
        calculate_per_token_loss=True,  # DDP then sums over replicas; the loss carries its own divisor
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths refuse the default, with or without experts
        batch_p2p_comm=HAS_CUDA,
        # the embedding's gradient; on a CPU that has one order in either form
        deterministic_mode=HAS_CUDA and torch.are_deterministic_algorithms_enabled(),
        batch_p2p_sync=False,
        transformer_impl="transformer_engine" if uses_transformer_engine(actor) else "local",
        **_fusions(actor),
        **_recompute(actor),
        **expert_config(
            config,
            actor.ep,
            actor.load_balancing_loss,
            actor.router_z_loss,
            fused_permutation=uses_transformer_engine(actor),
        ),
    )


# Checkpoints carry the names of Transformer Engine's layers with the norm in the product, so any spec can load them.
_NAMES_IN_CHECKPOINTS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def _local_layer(config: ModelConfig, actor: ActorSection) -> ModuleSpec:
    norm = RMSNorm if config.qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SDPACoreAttention if actor.cp == 1 else GatheredKeysAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, activation_func=swiglu, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_NAMES_IN_CHECKPOINTS,
        ),
    )


def _engine_layer(config: ModelConfig, actor: ActorSection) -> ModuleSpec:
    """Transformer Engine's layer. To recompute norms, or to adapt the products that follow, norms must be modules: it
    has them in these products.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_norm)
    redoes_norms = actor.recompute == "selective" and "layernorm" in actor.recompute_modules
    if redoes_norms or actor.lora is not None:
        backend = _engine_modules()
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = backend.layer_norm()
        parts.self_attention.submodules.linear_qkv = backend.column_parallel_linear()
        parts.mlp.submodules.linear_fc1 = backend.column_parallel_linear()
        parts.sharded_state_dict_keys_map = _NAMES_IN_CHECKPOINTS
    return layer


def _decoder_spec(config: ModelConfig, actor: ActorSection, stage: int) -> Any:
    """The layers of a pipeline stage: one spec for all of a dense model with Transformer Engine, else one a layer."""
    engine = uses_transformer_engine(actor)
    if engine and not config.num_experts:
        return _dense_layer(config, actor)
    per_stage = config.num_layers // actor.pp
    layers = [_layer(config, actor, number) for number in range(stage * per_stage, (stage + 1) * per_stage)]
    norm = _engine_modules().layer_norm() if engine else RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(config: ModelConfig, actor: ActorSection, number: int) -> ModuleSpec:
    """One layer, which has its norm before experts as a module, and there too under its own name in checkpoints."""
    layer = _dense_layer(config, actor)
    if number not in config.moe_layers:
        return layer
    submodules = layer.submodules.mlp.submodules
    if uses_transformer_engine(actor):  # as a module: the router reads its output, too
        layer.submodules.pre_mlp_layernorm = _engine_modules().layer_norm()
        if actor.lora is None:
            submodules.linear_fc1 = _engine_modules().column_parallel_linear()
    shared = ModuleSpec(module=SharedExpertMLP, submodules=submodules)
    redone = actor.recompute_modules if actor.recompute == "selective" else ()
    layer.module = RoutedLayer
    layer.submodules.mlp = ModuleSpec(
        module=ExpertLayer,
        params={"place": config.moe_layers.index(number), "recompute": "mlp" in redone},
        submodules=MoESubmodules(
            experts=ModuleSpec(
                module=GroupedExperts,
                params={"recompute_activation": "mlp_act" in redone, "lora": actor.lora},
            ),
            shared_experts=shared if config.shared_expert_intermediate_size else None,
            router=Router,
        ),
    )
    kept = "input_layernorm.weight"
    layer.submodules.sharded_state_dict_keys_map = {kept: _NAMES_IN_CHECKPOINTS[kept]}
    return layer


def _dense_layer(config: ModelConfig, actor: ActorSection) -> ModuleSpec:
    layer = _engine_layer(config, actor) if uses_transformer_engine(actor) else _local_layer(config, actor)
    if actor.recompute == "selective" and "mlp_act" in actor.recompute_modules:
        layer.submodules.mlp.module = RecomputedActivationMLP
    if actor.lora is not None:
        _adapt(layer, actor.lora)
    return layer


def _adapt(layer: ModuleSpec, lora: LoraSection) -> None:
    """Puts layers with adapters in the place of a layer's linear ones. Mutates the spec."""

    def column(*matrices: str) -> ModuleSpec:
        return ModuleSpec(module=AdaptedColumnLinear, params={"lora": lora, "matrices": matrices})

    def row(matrix: str) -> ModuleSpec:
        return ModuleSpec(module=AdaptedRowLinear, params={"lora": lora, "matrices": (matrix,)})

    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_qkv, attention.linear_proj = column("q_proj", "k_proj", "v_proj"), row("o_proj")
    mlp.linear_fc1, mlp.linear_fc2 = column("gate_proj", "up_proj"), row("down_proj")


def _engine_modules() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


class PolicyModel:
    """One pipeline stage of the model, called with micro-batches instead of megatron's eight arguments."""

    def __init__(self, config: ModelConfig, actor: ActorSection, groups: ActorGroups, max_context: int):
        self.config, self.groups = config, groups
        self.megatron_config = transformer_config(config, actor)
        self._rows: Tensor | None = None
        self.on_forward: Callable[[], object] = lambda: None
        """Called before each micro-batch."""
        self.collector: ForwardStateCollector | None = None
        padded = -(-config.vocab_size // actor.tp) * actor.tp
        with cpu_as_cuda():
            self.module = GPTModel(
                config=self.megatron_config,
                transformer_layer_spec=_decoder_spec(config, actor, groups.at.pp),
                vocab_size=padded,
                max_sequence_length=max_context,
                pre_process=groups.is_first_stage,
                post_process=groups.is_last_stage,
                # The local layers' core attention rotates.
                position_embedding_type="rope" if uses_transformer_engine(actor) else "none",
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                parallel_output=True,
            )
        self.module.to(current_device())  # megatron makes routers and shared experts' gates on the host
        mark_shards(self.module, groups, slots(config, actor.pp))
        self.adapters = {} if actor.lora is None else adapter_slots(config, actor.lora, actor.pp)
        """Factors of the adapters, and their full shapes."""
        if actor.lora is not None:
            mark_shards(self.module, groups, self.adapters)
            mark_partial(self.module, groups, self.adapters)
            freeze_base(self.module)
        # Not megatron's, which has three of Llama 3's four numbers in its code.
        inv_freq = inverse_frequencies(config).to(current_device())
        self._inv_freq: Tensor | None = None
        if uses_transformer_engine(actor):
            self.module.rotary_pos_emb.inv_freq = inv_freq
            keep_one_table(self.module.rotary_pos_emb, rotation_rows(max_context, actor.tp, actor.cp))
        else:
            self._inv_freq = inv_freq
        if groups.is_last_stage:
            self._select_rows_before_head(actor.sequence_parallel)

    def _select_rows_before_head(self, sequence_parallel: bool) -> None:
        """Prompt rows skip the LM head: a hook of the output layer keeps only the response rows.

        Under sequence parallel each rank holds a slice of the rows, so they are gathered first, and the head
        must no longer gather by itself; its input gradient is then summed over TP as without sequence
        parallel.
        """
        head = self.module.output_layer
        if sequence_parallel:
            head.sequence_parallel, head.allreduce_dgrad = False, True

        def keep(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            assert self._rows is not None
            hidden = args[0]  # [T, 1, H], or [T / tp, 1, H]
            if sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            return (hidden.index_select(0, self._rows), *args[1:])

        head.register_forward_pre_hook(keep)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Inside, this is the policy without its adapters, and hands out no hidden states. Without gradients only."""
        collector, self.collector = self.collector, None
        try:
            with without_adapters(self.module):
                yield
        finally:
            self.collector = collector

    def forward(self, wrapped: Any, batch: MicroBatch) -> Tensor:
        """Logits [1, N, V] of this rank's response rows, and of padding behind them, on the last stage, hidden states
        elsewhere.

        `wrapped` comes from the schedule: the module itself or its DDP wrapper.
        """
        self.on_forward()
        self._rows = batch.rows
        packing = batch.packing
        if self._inv_freq is not None:
            tables = rotation(batch.positions[0], self._inv_freq)
            packing = replace(packing, rotation=tables, masks={})  # which live as long as this forward's graph
        if batch.routing is not None:
            packing = replace(packing, routing=self._routing(batch, batch.routing))
        with nullcontext() if self.collector is None else self.collector.reading(batch):
            return wrapped(batch.input_ids, batch.positions, None, packed_seq_params=packing)

    def _routing(self, batch: MicroBatch, routing: Routing) -> Routing:
        """The inputs of this rank's routers in this forward; they write their statistics to `routing`, too."""
        routed_experts = recorded_routed_experts(batch) if routing.replays else None
        is_token = routing.is_token
        if self.megatron_config.sequence_parallel:
            at, tp = self.groups.at.tp, self.groups.dims.tp
            is_token = is_token.chunk(tp)[at]
            routed_experts = None if routed_experts is None else routed_experts.chunk(tp)[at]
        return replace(routing, is_token=is_token, routed_experts=routed_experts)

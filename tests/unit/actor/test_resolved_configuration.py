"""What megatron gets on a GPU machine with Transformer Engine: every value that is not its default, for two recipes.

CUDA and Transformer Engine are mocked; megatron checks the values itself.
"""

from __future__ import annotations

import dataclasses
import enum
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.actor import build, experts, optimizer
from megatron_tlt.actor.compat import keep_one_table
from megatron_tlt.config.actor import ActorSection
from megatron_tlt.config.load import load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import ModelConfig

# isort: split
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

RECIPES = Path("configs/recipes")
COMMON = {
    "add_bias_linear": False,
    "apply_rope_fusion": True,
    "attention_dropout": 0.0,
    "autocast_dtype": "torch.bfloat16",
    "batch_p2p_sync": False,
    "bf16": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "calculate_per_token_loss": True,
    "gated_linear_unit": True,
    "gradient_accumulation_fusion": True,
    "hidden_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "normalization": "RMSNorm",
    "params_dtype": "torch.bfloat16",
    "perform_initialization": False,
    "pipeline_dtype": "torch.bfloat16",
    "sequence_parallel": True,
    "variable_seq_lengths": True,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DDP = {
    "grad_reduce_in_fp32": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}
OPTIMIZER = {
    "bf16": True,
    "lr": 1e-6,
    "overlap_param_gather": True,
    "params_dtype": "torch.bfloat16",
    "use_distributed_optimizer": True,
}
# Of the shape, and what megatron derives from it.
SHAPE = {"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"}
SHAPE |= {"layernorm_epsilon", "activation_func", "init_method", "output_layer_init_method", "embedding_init_method"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with CUDA and Transformer Engine."""
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: object()))
    monkeypatch.setattr(build, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(build, "importlib", found)
    monkeypatch.setattr(optimizer, "HAS_CUDA", True)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, lambda *_: None)
    for name in ("permute", "permute_with_probs", "unpermute", "sort_chunks_by_index"):
        monkeypatch.setattr(moe_utils, f"fused_{name}", lambda *_: None, raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index_with_probs", lambda *_: None, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    monkeypatch.setattr(provider, "is_te_min_version", lambda version: True)


def chosen(config: Any, reference: Any) -> dict[str, Any]:
    """Fields that differ from those of `reference`, dtypes and enums as text."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    plain = {n: str(v) if isinstance(v, torch.dtype | enum.Enum) else v for n, v in found.items()}
    return {n: v for n, v in plain.items() if found[n] != getattr(reference, n) and n not in SHAPE}


def resolved(recipe: str, *overrides: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]:
    """TransformerConfig, DDP and optimizer configuration, and the layer's specification."""
    config = load_config(RECIPES / f"{recipe}.yaml", overrides)
    shape = config.model.architecture
    assert shape is not None
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    known = {n: getattr(shape, n) for n in fields if hasattr(shape, n)}
    model = ModelConfig(**known, qk_norm=shape.family in ("qwen3", "qwen3_moe"), qkv_bias=shape.family == "qwen2")
    actor = config.actor
    replicas = config.cluster.nodes * config.cluster.ranks_per_node // (actor.tp * actor.pp)
    transformer = build.transformer_config(model, actor)
    plain = TransformerConfig(num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=1)
    distributed = actor.shards_optimizer(config.optimizer, optimizer.HAS_CUDA)
    ddp = optimizer.ddp_config(actor, distributed, replicas)
    step = optimizer.optimizer_config(config.optimizer, actor, ddp)
    return (
        chosen(transformer, plain),
        chosen(ddp, optimizer.DistributedDataParallelConfig()),
        chosen(step, optimizer.OptimizerConfig()),
        build._decoder_spec(model, actor, stage=0),
    )


def test_a_gpu_gets_fused_kernels_and_overlapped_communication(gpu: None) -> None:
    transformer, ddp, step, layer = resolved("grpo-qwen3-8b-1n8g", "actor.recompute=full")
    assert transformer.pop("expert_tensor_parallel_size") == 4
    assert transformer == COMMON | FULL | {"qk_layernorm": True, "tensor_model_parallel_size": 4}
    assert ddp == DDP
    assert {n: step[n] for n in OPTIMIZER} == OPTIMIZER
    assert layer.submodules.input_layernorm is build.IdentityOp  # in the product that follows


def test_a_deterministic_run_has_megatron_s_deterministic_forms(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    transformer, _, _, _ = resolved("grpo-qwen3-8b-1n8g", "actor.recompute=none")
    assert transformer.pop("expert_tensor_parallel_size") and transformer["deterministic_mode"]
    monkeypatch.setattr(build, "HAS_CUDA", False)
    assert "deterministic_mode" not in resolved("grpo-qwen3-8b-1n8g", "distributed.device=cpu")[0]


def test_local_layers_name_the_norms_that_they_do_not_redo(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where auto resolves to them: a setting that does nothing is refused, one of two is named."""
    both = ActorSection(dtype="bf16", recompute="selective", recompute_modules=("layernorm", "mlp"))
    norms = both.model_copy(update={"recompute_modules": ("layernorm",)})
    assert {build.kind_of_layers(actor) for actor in (both, norms)} == {"Transformer Engine's"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert "layernorm" in build.kind_of_layers(both)
    assert "layernorm" not in build.kind_of_layers(both.model_copy(update={"recompute": "none"}))
    with pytest.raises(ConfigError, match=r"actor\.recompute_modules = .*local layers"):
        build.kind_of_layers(norms)


def test_norms_and_activation_are_redone_where_that_is_asked_for(gpu: None) -> None:
    transformer, _, _, layer = resolved("grpo-qwen3-8b-1n8g", "actor.recompute=selective")
    assert transformer["recompute_granularity"] == "selective"
    assert transformer["recompute_modules"] == ["layernorm"]
    assert layer.submodules.mlp.module is build.RecomputedActivationMLP
    assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is not build.IdentityOp
    assert layer.submodules.self_attention.submodules.linear_qkv is layer.submodules.mlp.submodules.linear_fc1
    assert layer.submodules.sharded_state_dict_keys_map == build._NAMES_IN_CHECKPOINTS


def test_transformer_engine_gets_its_own_context_parallelism(gpu: None) -> None:
    """A string: megatron indexes a list of `cp_comm_type` by layers that count from 1."""
    transformer, ddp, _, _ = resolved("grpo-qwen2.5-32b-128k-8n8g", "actor.recompute=full")
    transformer.pop("expert_tensor_parallel_size")
    ring = {"context_parallel_size": 8, "cp_comm_type": "p2p"}
    assert transformer == COMMON | FULL | ring | {"add_qkv_bias": True, "tensor_model_parallel_size": 8}
    assert ddp == DDP, "ranks of a replica's contexts share gradients and optimizer, too"


def test_layers_with_experts_have_their_norm_apart(gpu: None) -> None:
    transformer, _, _, block = resolved("grpo-qwen3-30b-a3b-8n8g")
    wanted = {"num_moe_experts": 128, "moe_router_topk": 8, "expert_model_parallel_size": 8}
    wanted |= {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none"}
    wanted |= {"moe_permute_fusion": True}
    assert {name: transformer[name] for name in wanted} == wanted
    assert len(block.layer_specs) == 48
    layer = block.layer_specs[0]
    assert layer.module is experts.RoutedLayer and layer.submodules.mlp.module is experts.ExpertLayer
    assert layer.submodules.pre_mlp_layernorm is not build.IdentityOp
    assert layer.submodules.mlp.params == {"place": 0, "recompute": True}


@pytest.mark.parametrize(
    ("capability", "dtype", "is_deterministic", "is_engine"),
    [
        ((9, 0), "bf16", True, True),
        ((10, 3), "bf16", False, True),
        ((10, 0), "bf16", True, False),
        ((8, 9), "bf16", False, False),
        ((12, 0), "bf16", False, False),
        ((9, 0), "fp32", False, False),
    ],
)
def test_auto_takes_transformer_engine_where_its_attention_takes_packed_rows(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: Any, is_deterministic: bool, is_engine: bool
) -> None:
    """Elsewhere it has no backend for them, and says so at the first forward: there flash_attn is asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    assert build.uses_transformer_engine(ActorSection(dtype=dtype)) == is_engine
    chosen = ActorSection(dtype="bf16", layer_spec="transformer_engine")
    assert build.uses_transformer_engine(chosen)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None if name == "flash_attn" else name)
    refusal = pytest.raises(ConfigError, match=r"actor.layer_spec = 'transformer_engine': needs the package flash_attn")
    with nullcontext() if is_engine or dtype == "fp32" else refusal:
        assert build.uses_transformer_engine(chosen)


def test_a_cpu_gets_what_it_got() -> None:
    """No overlap and no fusion that CUDA has: quickstart's weights are the same bits as before."""
    transformer, ddp, _, _ = resolved("grpo-qwen3-8b-1n8g", "distributed.device=cpu")
    fused = {n for n, v in transformer.items() if "fusion" in n and v}
    assert fused == {"gradient_accumulation_fusion"}
    assert set(ddp) == {"grad_reduce_in_fp32"}


def test_one_replica_has_nothing_to_overlap(gpu: None) -> None:
    _, ddp, _, _ = resolved("grpo-qwen2.5-0.5b-1n1g")
    assert "overlap_grad_reduce" not in ddp


def test_micro_batches_of_all_lengths_read_one_table_of_rotations() -> None:
    tables = []
    for is_one in (False, True):
        rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
        if is_one:
            keep_one_table(rotary, 32)
        for longest in (5, 9, 32):
            packing = SimpleNamespace(max_seqlen_q=longest, max_seqlen_kv=longest)
            tables.append(rotary(rotary.get_rotary_seq_len(None, None, None, None, packing), packed_seq=True))
    assert [len(table) for table in tables] == [5, 9, 32, 32, 32, 32]
    assert tables[3] is tables[4] is tables[5] and torch.equal(tables[3][:9], tables[1])

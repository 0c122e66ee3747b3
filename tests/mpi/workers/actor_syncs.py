"""How often an update waits for its device: values that it brings to the host, by the number of layers.

The layers are megatron's with packed rows in its format of Transformer Engine (thd), which runs on no CPU: kernels that
it has, RoPE and attention, are stood in for by something of the same shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.actor import attention, build
from megatron_tlt.distributed.world import World
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_models import random_weights
from tests.mpi.workers.actor_common import WeightedNll, say, sequences, train_batch
from tests.mpi.workers.actor_scenario import make_policy

# isort: split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils

_AS_OPERATOR = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
_AS_METHOD = {Tensor.tolist, Tensor.cpu, Tensor.numpy}


class Syncs(TorchFunctionMode):
    """Counts what would wait for a GPU, operators and methods, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count, counter = 0, self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                counter.count += func.name().split(".")[0] in _AS_OPERATOR
                return func(*args, **(kwargs or {}))

        self.operators = Operators()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _AS_METHOD
        return func(*args, **(kwargs or {}))


class ThdAttention(attention.SDPACoreAttention):
    """Something of attention's shapes: query [T, n, d], key and value [T, g, d] -> [T, n * d]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        assert query.dim() == 3
        rows, groups = query.shape[0], key.shape[1]
        mixed = query.view(rows, groups, -1, query.shape[-1]) * (key + value)[:, :, None]
        return mixed.reshape(rows, -1)


@contextmanager
def engine_layers(fused: bool) -> Any:
    """Policies built inside have megatron's configuration for Transformer Engine."""
    kept = build.uses_transformer_engine, build._decoder_spec, build._fusions, build.SDPACoreAttention
    thd = rope_utils.fused_apply_rotary_pos_emb_thd

    def spec(config: Any, actor: Any, stage: int) -> Any:
        layers = [build._local_layer(config, actor)] * (config.num_layers // actor.pp)
        return build.TransformerBlockSubmodules(layer_specs=layers, layer_norm=build.RMSNorm)

    build.uses_transformer_engine, build._decoder_spec = lambda actor: True, spec
    build._fusions = lambda actor: {**kept[2](actor), "apply_rope_fusion": fused}
    build.SDPACoreAttention = ThdAttention
    rope_utils.fused_apply_rotary_pos_emb_thd = lambda t, bounds, freqs, **_: t * freqs[-1, 0, 0, -1]
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd
    try:
        yield
    finally:
        build.uses_transformer_engine, build._decoder_spec, build._fusions, build.SDPACoreAttention = kept
        rope_utils.fused_apply_rotary_pos_emb_thd = rope_utils.fused_apply_rotary_pos_emb = thd


def _permute(tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, H] by expert, their gates [R], and their tokens, in operators that do not wait."""
    by_expert = routing_map.T.reshape(-1)
    places = by_expert.logical_not().to(torch.int8).argsort(stable=True)[:num_out_tokens]
    rows = places % len(tokens)
    return tokens.index_select(0, rows), probs.T.reshape(-1).index_select(0, places), rows


def _unpermute(permuted: Tensor, rows: Tensor, merging_probs: None, restore_shape: torch.Size) -> Tensor:
    return permuted.new_zeros(restore_shape).index_add(0, rows, permuted)


@contextmanager
def fused_experts() -> Any:
    """Policies built inside permute rows by stand-ins for Transformer Engine's functions. Of one rank."""
    stand_ins = {
        "HAVE_TE": True,
        "fused_permute": _permute,
        "fused_permute_with_probs": _permute,
        "fused_unpermute": _unpermute,
        # The chunks of one rank are in order.
        "fused_sort_chunks_by_index": lambda rows, sizes, order: rows,
        "fused_sort_chunks_by_index_with_probs": lambda rows, probs, sizes, order: (rows, probs),
    }
    configured = build.expert_config

    def fused_config(*given: Any, **_: Any) -> dict[str, Any]:
        return configured(*given, fused_permutation=True)

    with patch.multiple(moe_utils, create=True, **stand_ins), patch.object(build, "expert_config", fused_config):
        yield


def count(world: World, folder: Path, **actor: Any) -> tuple[int, float]:
    """Syncs of one update of a random model, and the norm of its gradient."""
    policy = make_policy(world, folder, loss=WeightedNll(), keep_reference=False, **actor)
    batch = train_batch([sequences(6)], [100.0])
    with Syncs() as found, found.operators:
        metrics = policy.train_step(batch).metrics
    return found.count, metrics["grad_norm"]


def of_two_and_four_layers(root: Path, scratch: Path, kind: str) -> list[Path]:
    """Two random models of a kind."""
    folders = []
    for layers in (2, 4):
        folder = scratch / f"{kind}-layers-{layers}"
        folder.mkdir(parents=True)
        config = json.loads((root / kind / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        shape = ModelConfig.from_hf(folder)
        save_hf(folder, shape, random_weights(shape))
        folders.append(folder)
    return folders


def syncs(world: World, root: Path, scratch: Path) -> None:
    """The same update with two and with four layers, as it is configured, without fused RoPE, and of experts with and
    without fused permutation."""
    dense, sparse = (of_two_and_four_layers(root, scratch, kind) for kind in ("qwen3", "qwen3_moe"))

    def of_both(folders: list[Path] = dense, **actor: Any) -> list[tuple[int, float]]:
        return [count(world, folder, **actor) for folder in folders]

    made: dict[str, list[tuple[int, float]]] = {"local": of_both()}
    runs: dict[str, Callable[[], list[tuple[int, float]]]] = {
        "engine": of_both,
        "engine, recompute": lambda: of_both(recompute="full"),
        "engine, activation again": lambda: of_both(recompute="selective", recompute_modules=["mlp_act"]),
    }
    with engine_layers(fused=True):
        made |= {name: run() for name, run in runs.items()}
    with engine_layers(fused=False):
        made["unfused"] = of_both()
    made["experts, unfused"] = of_both(sparse)
    with fused_experts():
        made["experts"] = of_both(sparse)
    say(world, case="syncs", **made)

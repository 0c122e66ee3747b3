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

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.actor import attention, build
from megatron_tlt.distributed.world import World
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_writer import save_hf
from tests.helpers.tiny_models import random_weights
from tests.mpi.workers.actor_common import WeightedNll, say, sequences, train_batch
from tests.mpi.workers.actor_scenario import make_policy

# isort: split
from megatron.core.models.common.embeddings import rope_utils

_AS_OPERATOR = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
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


def count(world: World, folder: Path, **actor: Any) -> tuple[int, float]:
    """Syncs of one update of a random model, and the norm of its gradient."""
    policy = make_policy(world, folder, loss=WeightedNll(), keep_reference=False, **actor)
    batch = train_batch([sequences(6)], [100.0])
    with Syncs() as found, found.operators:
        metrics = policy.train_step(batch).metrics
    return found.count, metrics["grad_norm"]


def syncs(world: World, root: Path, scratch: Path) -> None:
    """The same update with two and with four layers, as it is configured and without fused RoPE."""
    folders = []
    for layers in (2, 4):
        folder = scratch / f"layers-{layers}"
        folder.mkdir(parents=True)
        config = json.loads((root / "qwen3" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        shape = ModelConfig.from_hf(folder)
        save_hf(folder, shape, random_weights(shape))
        folders.append(folder)

    def of_both(**actor: Any) -> list[tuple[int, float]]:
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
    say(world, case="syncs", **made)

"""Megatron's Transformer Engine layers on CPU ranks, over the stand-in of tests/helpers/te_cpu, against the local ones.

Arguments: directory with models, scratch directory with converted ones, and [layout, kind, variant] triples as JSON.
The policy's build sees a GPU: it takes that device's branches, and finds the stand-in in Transformer Engine's place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformer_engine.pytorch.distributed import recomputed

from megatron_tlt.actor import build
from megatron_tlt.actor.compat import cpu_as_cuda
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from tests.mpi.workers.actor_checkpoint import load, once, save, start
from tests.mpi.workers.actor_common import relative_error, say, sequences, share
from tests.mpi.workers.actor_scenario import make_policy, run_scenario, scenario_policy

# isort: split
# megatron comes after compat.
from megatron.core import dist_checkpointing

ENGINE, LOCAL = {"layer_spec": "transformer_engine"}, {"layer_spec": "local"}
SP = {"tp": 2, "sequence_parallel": True}
NORMS = {"recompute": "selective", "recompute_modules": ["layernorm"]}  # with norms as modules


def outcome(world: World, directory: Path, variant: str, layout: dict[str, Any]) -> dict[str, Any]:
    """The scenario's outcome, log-probs from before it, kinds of modules, and whether norms are recomputed."""
    policy = scenario_policy(world, directory, variant, **layout)
    logprobs = policy.logprobs(share(sequences(18), policy.dims.dp, policy.groups.at.dp), 0.8)
    modules = {type(module).__name__ for module in policy.model.module.modules()}
    found = {**run_scenario(policy), "logprobs": logprobs, "modules": modules}
    return found | {"norms": all(layer.recompute_input_layernorm for layer in policy.model.module.decoder.layers)}


def compare(world: World, root: Path, kind: str, variant: str, layout: dict[str, Any]) -> None:
    """The scenario with either layers, in one layout; every rank's view counts."""
    found, wanted = (outcome(world, root / kind, variant, layout | spec) for spec in (ENGINE, LOCAL))
    logprobs = zip(found["logprobs"], wanted["logprobs"], strict=True)
    errors = {"logprobs": max((float(abs(a - b).max()) for a, b in logprobs), default=0.0)}
    for name in ("loss", "grad_norm"):
        errors[name] = max(abs(a - b) / abs(b) for a, b in zip(found[name], wanted[name], strict=True))
    for name in {"weights", "gradients"} & wanted.keys():
        errors[name] = relative_error(found[name], wanted[name])[0]
    views = world.all_gather_object(errors)
    worst = {name: max(view[name] for view in views) for name in errors}
    modules = sorted(name for name in found["modules"] if name.startswith("TE"))
    case = {"kind": kind, "variant": variant, "layout": layout, "errors": worst}
    say(world, case="layers", **case, modules=modules, norms=found["norms"], recomputed=len(recomputed))


def converted(world: World, root: Path, directory: Path, layout: dict[str, Any]) -> None:
    """Reads a converted checkpoint as Megatron-LM does, with every extra state; the keys that a model left unfilled."""
    kind = layout.pop("model")
    policy = make_policy(world, root / kind, keep_reference=False, **layout)
    module, is_mixed = policy.model.module, policy.config.has_mixed_layers
    error, missing = "", []
    with cpu_as_cuda():
        metadata = {"non_homogeneous_layers": is_mixed, "dp_cp_group": policy.groups.dp}
        wanted = {"model": module.sharded_state_dict(metadata=metadata)}
        try:
            found = dist_checkpointing.load(wanted, str(directory / "release"))["model"]
            missing = module.load_state_dict(found, strict=False).missing_keys
        except BaseException as failure:  # noqa: BLE001  torch's is no Exception; said on all ranks
            error = str(failure)[-300:]
    states = sum(name.endswith("_extra_state") for name in wanted["model"])
    say(world, case="converted", kind=kind, error=error, missing=missing, states=states)


def checkpoints(world: World, root: Path, scratch: Path) -> None:
    """Saved with one kind of layers and loaded with the other, in other layouts; runs from and to Hugging Face."""
    engine, local = SP | ENGINE, SP | LOCAL
    for name, verb, layout in (
        ("engine", save, engine | NORMS),
        ("engine", load, engine | NORMS),
        ("engine", load, engine),
        ("engine", load, {"pp": 2} | LOCAL),
        ("local", save, local),
        ("local", load, engine),
        ("local", load, {"pp": 2} | ENGINE | NORMS),
        ("dense", once, engine),
        ("mixed", once, engine | NORMS | {"model": "qwen2_moe", "ep": 2}),
        ("qwen3-mg", start, engine),
        ("qwen3-mg", converted, engine | {"model": "qwen3"}),
        ("qwen2_moe-mg", converted, engine | {"model": "qwen2_moe", "ep": 2}),
    ):
        directory = scratch / name
        if world.is_main:
            directory.mkdir(exist_ok=True)
        world.barrier()
        verb(world, root, directory, layout)


def main() -> None:
    """All triples, then the checkpoints."""
    world = World.start(DistributedSection(device="cpu"), threads=1)
    build.HAS_CUDA, build._has_packed_attention = True, lambda: True
    root, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    for layout, kind, variant in json.loads(sys.argv[3]):
        compare(world, root, kind, variant, layout)
    checkpoints(world, root, scratch)
    world.close()


if __name__ == "__main__":
    main()

"""Several ranks: the scenario at many layouts against its one-rank outcome.

Arguments: directory, and [layout, kind, variant] triples as JSON; see `scenario_policy`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from tests.mpi.workers.actor_common import (
    LORA_KINDS,
    Exploding,
    Products,
    relative_error,
    say,
    sequences,
    share,
    train_batch,
)
from tests.mpi.workers.actor_hidden_states import hidden_states
from tests.mpi.workers.actor_scenario import copy_of, make_policy, run_scenario, scenario_policy
from tests.mpi.workers.actor_zero_advantages import zero_advantages


class Communication(TorchDispatchMode):
    """Collects `groups`, the names of process groups of several ranks, in which something is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args if func.namespace == "c10d" else ():
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = dist.ProcessGroup.unbox(value)
                if group.size() > 1:
                    self.groups.add(group.group_name)
        return func(*args, **(kwargs or {}))


def compare(world: World, root: Path, kind: str, layout: dict[str, Any], variant: str) -> None:
    """One kind at one layout."""
    expected = torch.load(root / f"{kind}.tp1.pt", weights_only=False)[variant]
    source = torch.load(root / f"{kind}.pt", weights_only=False)
    source = source["lora"] if variant == "lora" else source
    policy = scenario_policy(world, root / kind, variant, **layout)
    loaded = copy_of(policy.named_weights())
    exact = set(loaded) == set(source["weights"])
    if variant == "lora":
        exact &= relative_error(loaded, source["weights"])[0] <= 1e-6
    else:
        exact &= all(torch.equal(t, source["weights"][n]) for n, t in loaded.items())
    every = sequences(18)
    mine = policy.logprobs(share(every, policy.dims.dp, policy.groups.at.dp), 0.8)
    wanted = share(source["logprobs"][0.8], policy.dims.dp, policy.groups.at.dp)
    logprobs = max((float(abs(a - b).max()) for a, b in zip(mine, wanted, strict=True)), default=0.0)
    with Communication() as used:
        found = run_scenario(policy)
        copy_of(policy.named_weights())
    opened = {group.group_name for group in policy.communicating()}
    if layout.get("distributed_optimizer") == "on":  # gradients stay with their owners there
        found["gradients"] = expected["gradients"]
    outcome = {
        "exact": exact,
        "unopened": len(used.groups - opened),
        "logprobs": logprobs,
        "gradients": relative_error(found["gradients"], expected["gradients"])[0],
        "weights": relative_error(found["weights"], expected["weights"])[0],
    }
    for name in ("loss", "grad_norm", "entropy"):
        outcome[name] = max(abs(a - b) / abs(b) for a, b in zip(found[name], expected[name], strict=True))
    # Every rank checks its own view; rank 0 tells the worst.
    views = world.all_gather_object(outcome)
    worst = {name: (all if name == "exact" else max)(view[name] for view in views) for name in outcome}
    say(world, case="layout", kind=kind, layout=layout, variant=variant, **worst)


def skip_everywhere(world: World, root: Path) -> None:
    """A gradient that explodes on one replica only must be refused by all."""
    policy = make_policy(world, root / "qwen2", loss=Exploding(), keep_reference=False)
    before = copy_of(policy.named_weights())
    batch = train_batch([sequences(2) if world.rank == 0 else []], [1.0])
    out = policy.train_step(batch)
    untouched = all(torch.equal(t, before[n]) for n, t in policy.named_weights())
    say(world, case="skip", views=world.all_gather_object([out.skipped, untouched]))


def half_precision(world: World, root: Path) -> None:
    """bf16 where a rank has a part of the rows: near transformers, in products of few numbers of rows."""
    wanted = torch.load(root / "qwen3.pt", weights_only=False)["logprobs"][0.8]
    for layout in ({"cp": 2}, {"tp": 2, "sequence_parallel": True}):
        policy = make_policy(world, root / "qwen3", keep_reference=False, dtype="bf16", **layout)
        with Products() as products:
            mine = policy.logprobs(sequences(18), 0.8)
        distance = max(float(abs(a - b).max()) for a, b in zip(mine, wanted, strict=True))
        views = world.all_gather_object((distance, products.rows))
        rows = sorted(set.union(*(of for _, of in views)))
        say(world, case="bf16", layout=layout, distance=max(far for far, _ in views), rows=rows)


def overlap_changes_nothing(world: World, root: Path) -> None:
    """A sharded optimizer leaves the gathering of weights to the forwards of the modules that own them: some parameters
    are read elsewhere (adapters, experts, a tied head). With the gather in the forwards and without: the same bits.
    """
    for kind in LORA_KINDS:
        for variant in ("adam", "lora_adam"):
            weights = []
            for overlap in ("on", "off"):
                policy = scenario_policy(world, root / kind, variant, distributed_optimizer="on", overlap=overlap)
                weights.append(run_scenario(policy)["weights"])
            same = all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
            views = world.all_gather_object(same)
            say(world, case="overlap", kind=kind, variant=variant, same=all(views), names=len(weights[0]))


def main() -> None:
    """All triples, in order (neighbours of one layout share its process groups)."""
    world = World.start(DistributedSection(device="cpu"), threads=1)
    root = Path(sys.argv[1])
    for layout, kind, variant in json.loads(sys.argv[2]):
        compare(world, root, kind, layout, variant)
    skip_everywhere(world, root)
    zero_advantages(world, root)
    hidden_states(world, root)
    if world.size == 2:
        half_precision(world, root)
        overlap_changes_nothing(world, root)
    world.close()


if __name__ == "__main__":
    main()

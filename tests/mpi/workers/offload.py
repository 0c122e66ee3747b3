"""Updates with the optimizer on the host between them, and without: the same bits. Arguments: models, scratch, layouts.

Each layout runs twice: two updates, a save, a load, a third update. What both save, and end with, is compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from tests.mpi.workers.actor_common import WeightedNll, say, sequences, share, train_batch
from tests.mpi.workers.actor_scenario import ADAM, SGD, copy_of, make_policy


def state_tensors(policy: Any) -> list[torch.Tensor]:
    """Moments and master weights as megatron holds them."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.module.parameters()}
    found = []
    for part in policy.optimizer.chained_optimizers:
        inner = part.optimizer
        found += [p for group in inner.param_groups for p in group["params"]]
        found += [
            v for state in inner.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim
        ]
    return [t for t in found if t.untyped_storage().data_ptr() not in weights]


def device_bytes(policy: Any) -> dict[str, int]:
    """Memory of the state's and the gradients' storages now."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in state_tensors(policy)}
    buffers = policy.ddp.buffers
    return {
        "state": sum(s.nbytes() for s in storages.values()),
        "gradients": sum(b.grad_data.untyped_storage().nbytes() for b in buffers),
    }


def run(world: World, root: Path, scratch: Path, layout: dict[str, Any], offload: bool) -> dict[str, Any]:
    """The outcome of one run, and what lay on the device between the updates."""
    layout = {**layout, "offload_optimizer": offload}
    section = SGD if layout.pop("sgd", False) else ADAM
    policy = make_policy(world, root / "qwen3", section, WeightedNll(), keep_reference=False, **layout)
    metrics, between = [], [device_bytes(policy)]

    def update(number: int) -> None:
        mine = share(sequences(8, seed=100 + number), policy.dims.dp, policy.groups.at.dp)
        batch = train_batch([mine[: len(mine) // 2], mine[len(mine) // 2 :]], [60.0, 60.0])
        metrics.append(policy.train_step(batch).metrics)
        between.append(device_bytes(policy))

    update(1)
    update(2)
    directory = scratch / f"offload-{offload}" / "step-000002"
    policy.start_save(directory, {}).wait()
    scores = policy.logprobs(share(sequences(8), policy.dims.dp, policy.groups.at.dp), 1.0)
    update(3)
    policy.load(directory)
    update(3)
    with policy._offload.on_device():
        state = [t.clone() for t in state_tensors(policy)]
    return {
        "metrics": metrics,
        "between": between,
        "weights": copy_of(policy.named_weights()),
        "state": state,
        "scores": scores,
    }


def main() -> None:
    world = World.start(DistributedSection(device="cpu"), threads=1)
    root, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    for number, layout in enumerate(json.loads(sys.argv[3])):
        on, off = (run(world, root, scratch / str(number), layout, offload) for offload in (True, False))
        same = {
            "metrics": on["metrics"] == off["metrics"],
            "weights": all(torch.equal(on["weights"][n], t) for n, t in off["weights"].items()),
            "state": len(on["state"]) == len(off["state"])
            and all(torch.equal(a, b) for a, b in zip(on["state"], off["state"], strict=True)),
            "scores": all((a == b).all() for a, b in zip(on["scores"], off["scores"], strict=True)),
            "repeated": on["metrics"][2] == on["metrics"][3],
        }
        views = world.all_gather_object((same, on["between"], off["between"]))
        say(
            world,
            case="offload",
            layout=layout,
            same={name: all(view[0][name] for view in views) for name in same},
            on=[view[1] for view in views],
            off=[view[2] for view in views],
        )
    world.close()


if __name__ == "__main__":
    main()

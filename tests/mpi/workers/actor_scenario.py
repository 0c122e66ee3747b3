"""One update scenario, run at any layout, whose outcome must not depend on the layout. Needs megatron.

Three optimizer steps in two `train_step`s: ten sequences at once, then two mini-batches, of which the second
has so few sequences that some data-parallel ranks get none.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from megatron_tlt.actor import weights
from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.actor.weights import named_tensors
from megatron_tlt.algorithms.base import Algorithm
from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.actor import ActorSection, OptimizerSection
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.model import ModelSection
from tests.mpi.workers.actor_common import (
    LORA,
    ClippedRatio,
    sequences,
    share,
    shortened,
    train_batch,
    with_routed_experts,
)

SGD = OptimizerSection(name="sgd", lr=0.05, clip_grad=1.0)
ADAM = OptimizerSection(name="adam", lr=1e-3, clip_grad=1.0)
REPLAYED = {"router_replay": "rollout"}
ROUTED = {**REPLAYED, "load_balancing_loss": 0.1, "router_z_loss": 0.01}


def make_policy(
    world: Any,
    directory: Path,
    optimizer: OptimizerSection = SGD,
    loss: Any = None,
    keep_reference: bool = True,
    megatron_path: str | None = None,
    **actor: Any,
) -> MegatronPolicy:
    """A policy of the tiny model in `directory` at the layout in `actor`."""
    return MegatronPolicy(
        world,
        ModelSection(path=str(directory), megatron_path=megatron_path, max_context=512),
        ActorSection(**{"micro_batch_tokens": 160, **actor}),
        optimizer,
        loss or ClippedRatio(),
        total_optimizer_steps=10,
        keep_reference=keep_reference,
    )


def scenario_policy(world: Any, directory: Path, variant: str, **layout: Any) -> MegatronPolicy:
    """The scenario with "sgd", with "adam", or with "gspo": SGD, a loss that reads whole responses, and short ones.

    "routed": SGD, replayed experts, and the routers' losses; "replayed": without these. "lora", "lora_adam": adapters,
    which start from the PEFT directory beside the model.
    """
    if variant.startswith("lora"):
        lora = {**LORA, "adapter_path": f"{directory}-adapter"}
        return make_policy(world, directory, SGD if variant == "lora" else ADAM, lora=lora, **layout)
    if variant in ("routed", "replayed"):
        return make_policy(world, directory, SGD, **(ROUTED if variant == "routed" else REPLAYED), **layout)
    if variant != "gspo":
        return make_policy(world, directory, SGD if variant == "sgd" else ADAM, **layout)
    loss = build_algorithm(AlgorithmSection(name="gspo", ratio_clip_low=0.1, ratio_clip_high=0.1), 40)
    return make_policy(world, directory, SGD, loss, keep_reference=False, **layout)


def scenario_batches(dp: int, at: int, with_short: bool = False, routed_layers: int = 0) -> list[Any]:
    """The two TrainBatches of the scenario for one data-parallel rank."""
    every = shortened(sequences(18)) if with_short else sequences(18)
    every = with_routed_experts(every, routed_layers) if routed_layers else every
    first = train_batch([share(every[:10], dp, at)], [137.0], temperature=0.8)
    second = train_batch([share(every[10:15], dp, at), share(every[15:], dp, at)], [90.0, 61.0], temperature=0.8)
    return [first, second]


def run_scenario(policy: MegatronPolicy) -> dict[str, Any]:
    """Losses, gradient norms, entropies, the gradients of the first step and the weights after all three."""
    out: dict[str, Any] = {"loss": [], "grad_norm": [], "entropy": []}
    with_short = isinstance(policy.loss, Algorithm)  # of "gspo"
    routed = len(policy.config.moe_layers) if policy.actor.router_replay == "rollout" else 0
    for i, batch in enumerate(scenario_batches(policy.dims.dp, policy.groups.at.dp, with_short, routed)):
        metrics = policy.train_step(batch).metrics
        for name in ("loss", "grad_norm", "entropy"):
            out[name].append(metrics[name])
        if i == 0 and policy.actor.distributed_optimizer != "on":
            out["gradients"] = copy_of(named_gradients(policy))
    out["weights"] = copy_of(policy.named_weights()) | copy_of(named_factors(policy, attrgetter("data")))
    return out


def named_gradients(policy: MegatronPolicy) -> Iterator[tuple[str, Tensor]]:
    """The last step's summed gradients, after clipping, under Hugging Face names. Not of the distributed optimizer."""
    read = attrgetter("main_grad")
    if policy.actor.lora is not None:
        return named_factors(policy, read)
    return named_tensors(policy.model.module, policy.config, policy.groups, read)


def named_factors(policy: MegatronPolicy, read: Any) -> Iterator[tuple[str, Tensor]]:
    """`read(parameter)` of every adapter's factors, whole, as `named_tensors` does of a model's; none without adapters.

    To be read to its end at once.
    """
    adapters = policy.model.adapters
    if adapters:
        shapes = {slot.hf_names[0]: shape for slot, shape in adapters.items()}
        config: Any = SimpleNamespace(parameter_shapes=lambda: shapes)
        with mock.patch.object(weights, "slots", return_value=list(adapters)):
            yield from named_tensors(policy.model.module, config, policy.groups, read)


def copy_of(named: Any) -> dict[str, Tensor]:
    """A dictionary of clones."""
    return {name: tensor.clone() for name, tensor in named}

"""One rank: the actor against transformers, packing, precision, recompute, optimizer guards.

Arguments: a directory with one model directory and one NAME.pt of expected values per kind. It gets a
NAME.tp1.pt per kind.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_tlt.actor import build, elementwise, experts, lora
from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.config.actor import ActorSection
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.world import World
from megatron_tlt.models.hf.config import ModelConfig
from tests.mpi.workers.actor_common import (
    KINDS,
    LORA,
    LORA_KINDS,
    MOE_KINDS,
    Exploding,
    Products,
    WeightedNll,
    relative_error,
    say,
    sequences,
    train_batch,
    with_routed_experts,
)
from tests.mpi.workers.actor_hidden_states import hidden_states
from tests.mpi.workers.actor_scenario import (
    ADAM,
    ROUTED,
    SGD,
    copy_of,
    make_policy,
    named_gradients,
    run_scenario,
    scenario_policy,
)
from tests.mpi.workers.actor_syncs import syncs


def worst(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Largest absolute difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


def parity(world: World, root: Path, kind: str) -> None:
    """Weights, log-probs and gradients against transformers."""
    expected = torch.load(root / f"{kind}.pt", weights_only=False)
    policy = make_policy(world, root / kind, loss=WeightedNll(), optimizer=SGD.model_copy(update={"clip_grad": 0.0}))
    weights = copy_of(policy.named_weights())
    same = set(weights) == set(expected["weights"]) and all(
        torch.equal(weights[n], expected["weights"][n]) for n in weights
    )
    errors = {str(t): worst(policy.logprobs(sequences(18), t), lp) for t, lp in expected["logprobs"].items()}
    reference = worst(policy.logprobs(sequences(18), 0.8, which="reference"), expected["logprobs"][0.8])
    with mock.patch.object(world._phase, "monitor") as monitor:
        out = policy.train_step(train_batch([sequences(18)], [250.0], temperature=0.8))
    gradients, where = relative_error(copy_of(named_gradients(policy)), expected["gradients"])
    say(
        world,
        case="parity",
        kind=kind,
        same_weights=same,
        logprobs=errors,
        reference=reference,
        gradients=gradients,
        where=where,
        loss=abs(out.metrics["loss"] - expected["loss"]),
        entropy=abs(out.metrics["entropy"] - expected["entropy"]),
        signs_of_life=monitor.report.call_count,
        micro_batches=len(policy._pack(sequences(18))),
    )


def lora_parity(world: World, root: Path, kind: str) -> None:
    """Adapters from a PEFT directory, against transformers with weights merged by hand; the reference is the base."""
    found = torch.load(root / f"{kind}.pt", weights_only=False)
    expected, plain = found["lora"], SGD.model_copy(update={"clip_grad": 0.0})
    lora = {**LORA, "adapter_path": str(root / f"{kind}-adapter")}
    policy = make_policy(world, root / kind, plain, WeightedNll(), lora=lora)
    trained = {name for name, p in policy.model.module.named_parameters() if hasattr(p, "main_grad")}
    say(
        world,
        case="lora",
        kind=kind,
        weights=relative_error(copy_of(policy.named_weights()), expected["weights"])[0],
        reference=worst(policy.logprobs(sequences(18), 0.8, which="reference"), found["logprobs"][0.8]),
        logprobs=worst(policy.logprobs(sequences(18), 0.8), expected["logprobs"][0.8]),
        loss=abs(
            policy.train_step(train_batch([sequences(18)], [250.0], temperature=0.8)).metrics["loss"] - expected["loss"]
        ),
        gradients=relative_error(copy_of(named_gradients(policy)), expected["gradients"]),
        only_factors=all(name.endswith(("lora_A", "lora_B")) for name in trained),
        state=sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"]),
        factors=sum(t.numel() for t in expected["gradients"].values()),
    )


def routed(world: World, root: Path) -> None:
    """Replayed experts and the routers' losses, all rows in one micro-batch: gradients against transformers."""
    policy = make_policy(
        world,
        root / "qwen3_moe",
        SGD.model_copy(update={"clip_grad": 0.0}),
        WeightedNll(),
        keep_reference=False,
        micro_batch_tokens=100_000,
        **ROUTED,
    )
    expected = torch.load(root / "qwen3_moe.pt", weights_only=False)
    every = with_routed_experts(sequences(18), 4)
    metrics = policy.train_step(train_batch([every], [250.0], temperature=0.8)).metrics
    recorded = [s.trajectory.routed_experts for s in every]
    known = sum(int((ids[:, 0, 0] >= 0).sum()) for ids in recorded if ids is not None)
    say(
        world,
        case="routed",
        gradients=relative_error(copy_of(named_gradients(policy)), expected["routed"])[0],
        known=known / sum(s.trajectory.length - 1 for s in every),
        metrics=metrics,
    )


def devices(world: World, root: Path) -> None:
    """Parameters that are not on the present device, where that is another one than the host's: PyTorch's meta."""
    meta = torch.device("meta")
    with ExitStack() as replaced:
        for module in (build, elementwise, experts, lora):
            replaced.enter_context(mock.patch.object(module, "current_device", return_value=meta))
        replaced.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=meta))
        replaced.enter_context(mock.patch.object(build, "HAS_CUDA", True))
        config, groups = ModelConfig.from_hf(root / "qwen2_moe"), ActorGroups.create(world, Dims(1, 1, 1, 1))
        for adapters in (None, LORA):
            actor = ActorSection(layer_spec="local", lora=adapters)
            parameters = build.PolicyModel(config, actor, groups, 512).module.named_parameters()
            elsewhere = [name for name, parameter in parameters if parameter.device != meta]
            say(world, case="devices", with_adapters=adapters is not None, elsewhere=elsewhere)


def packing(world: World, root: Path) -> None:
    """One sequence per micro-batch, a few, all in one: same gradients. Recompute: the same bits."""
    made: dict[str, Any] = {}
    for name, actor in {
        "one": {"micro_batch_tokens": 1},
        "some": {},
        "all": {"micro_batch_tokens": 100_000},
        "full": {"recompute": "full"},
        "selective": {"recompute": "selective"},
        "mlp": {"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]},
    }.items():
        policy = make_policy(world, root / "qwen3", loss=WeightedNll(), keep_reference=False, **actor)
        metrics = policy.train_step(train_batch([sequences(18)], [250.0])).metrics
        made[name] = (copy_of(named_gradients(policy)), metrics["micro_batches"])
    say(
        world,
        case="packing",
        micro_batches={name: count for name, (_, count) in made.items()},
        some=relative_error(made["some"][0], made["one"][0])[0],
        all=relative_error(made["all"][0], made["one"][0])[0],
        recompute_same_bits=all(
            torch.equal(made[name][0][n], g)
            for name in ("full", "selective", "mlp")
            for n, g in made["some"][0].items()
        ),
    )


def guards(world: World, root: Path) -> None:
    """Clipping, the refusal of non-finite gradients."""
    policy = make_policy(world, root / "qwen2", loss=Exploding(), keep_reference=False)
    before = copy_of(policy.named_weights())
    out = policy.train_step(train_batch([sequences(4)], [1.0]))
    untouched = all(torch.equal(t, before[n]) for n, t in policy.named_weights())
    tight = make_policy(
        world, root / "qwen2", SGD.model_copy(update={"clip_grad": 1e-3, "weight_decay": 0.0}), WeightedNll(), False
    )
    clipped = tight.train_step(train_batch([sequences(4)], [50.0])).metrics
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for _, g in named_gradients(tight)))
    moved = math.sqrt(sum(float((t - before[n]).double().pow(2).sum()) for n, t in tight.named_weights()))
    say(
        world,
        case="guards",
        skipped=out.skipped,
        version=out.policy_version,
        skipped_steps=out.metrics["skipped_steps"],
        untouched=untouched,
        grad_norm=clipped["grad_norm"],
        norm_after_clip=norm,
        moved=moved,
    )


def nothing_trained(world: World, root: Path) -> None:
    """A denominator of zero: Adam must not move on momentum or weight decay, nor metrics on such a mini-batch."""
    policy, beside = (make_policy(world, root / "qwen2", ADAM, WeightedNll(), keep_reference=False) for _ in range(2))
    alone = policy.train_step(train_batch([sequences(4)], [50.0])).metrics
    metrics = beside.train_step(train_batch([sequences(4), []], [50.0, 0.0])).metrics
    same = all(metrics[name] == alone[name] != 0 for name in ("loss", "grad_norm", "grad_clipped"))
    before = copy_of(policy.named_weights())
    out = policy.train_step(train_batch([[], []], [0.0, 0.0]))
    untouched = all(torch.equal(t, before[n]) for n, t in policy.named_weights())
    untouched = untouched and out.skipped and out.policy_version == 1
    left = {"untouched": untouched, "metrics": out.metrics, "position": policy.optimizer_steps}
    say(world, case="nothing_trained", same_metrics=same, **left)


def decay(world: World, root: Path) -> None:
    """The same step with and without weight decay: which weights differ."""
    for section in (SGD, ADAM):
        plain, decayed = (
            make_policy(world, root / "qwen2", section.model_copy(update={"weight_decay": wd}), WeightedNll(), False)
            for wd in (0.0, 0.1)
        )
        for policy in (plain, decayed):
            policy.train_step(train_batch([sequences(4)], [50.0]))
        other = copy_of(decayed.named_weights())
        same = {n: torch.equal(t, other[n]) for n, t in plain.named_weights()}
        flat = {n for n, t in other.items() if t.dim() == 1}
        say(
            world,
            case="decay",
            optimizer=section.name,
            vectors_untouched=bool(flat) and all(same[n] for n in flat),
            matrices_decayed=not any(same[n] for n in set(same) - flat),
        )


def precision(world: World, root: Path) -> None:
    """bf16 parameters with fp32 masters stay close to fp32, and learn; products have few numbers of rows."""
    exact = make_policy(world, root / "qwen3", ADAM, WeightedNll(entropy_factor=0.0), False)
    rough = make_policy(world, root / "qwen3", ADAM, WeightedNll(entropy_factor=0.0), False, dtype="bf16")
    with Products() as products:
        found = rough.logprobs(sequences(8), 1.0)
    distance = worst(found, exact.logprobs(sequences(8), 1.0))
    dtypes = {str(t.dtype) for _, t in rough.named_weights()}
    batch = train_batch([[_positive(s) for s in sequences(8)]], [100.0])
    losses = [rough.train_step(batch).metrics["loss"] for _ in range(4)]
    say(world, case="bf16", distance=distance, dtypes=sorted(dtypes), losses=losses, rows=sorted(products.rows))


def _positive(sequence: Any) -> Any:
    sequence.advantages = np.abs(sequence.advantages)
    return sequence


def main() -> None:
    """All cases, then the one-rank outcome of the scenario for the parallel tests."""
    world = World.start(DistributedSection(device="cpu"), threads=1)
    root = Path(sys.argv[1])
    for kind in (*KINDS, *MOE_KINDS):
        parity(world, root, kind)
        # Adam divides rounding noise, and a changed digit can flip a near tie of two experts.
        names: tuple[str, ...] = ("sgd", "routed", "replayed") if kind in MOE_KINDS else ("sgd", "adam", "gspo")
        if kind in LORA_KINDS:
            lora_parity(world, root, kind)
            names += ("lora",)
        outcome = {name: run_scenario(scenario_policy(world, root / kind, name)) for name in names}
        torch.save(outcome, root / f"{kind}.tp1.pt")
    routed(world, root)
    devices(world, root)
    packing(world, root)
    guards(world, root)
    nothing_trained(world, root)
    decay(world, root)
    precision(world, root)
    syncs(world, root, root / "syncs")
    hidden_states(world, root)
    world.close()


if __name__ == "__main__":
    main()

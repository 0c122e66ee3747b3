"""Ways of running that a simulation compares, and sweeps over the number of nodes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from megatron_tlt.config.checks.sim import check_sim
from megatron_tlt.config.planning.parameters import total_parameters
from megatron_tlt.config.root import Config
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.cluster import weight_passes
from megatron_tlt.sim.limits import check_limits
from megatron_tlt.sim.result import MODES, Comparison, Point, SimResult
from megatron_tlt.sim.simulate import Simulation
from megatron_tlt.sim.trace import Lengths

AnyConfig = TypeVar("AnyConfig", Config, SimConfig)


def simulate(configs: Sequence[SimConfig], modes: Sequence[str], assumed: Sequence[str] = ()) -> SimResult:
    """All modes of each of `configs`, which differ in their nodes (`on_nodes`). The first mode is the baseline of the
    comparisons. `assumed`: what was assumed to make `configs` of a run's (`from_run`).

    Raises ConfigError with every problem found.
    """
    runs = [(mode, in_mode(config, mode)) for config in configs for mode in modes]
    if problems := list(check_limits([config for _, config in runs])):  # all are checked before the first is run
        raise ConfigError(problems)
    points = [Simulation(config).run(mode) for mode, config in runs]
    bases = {point.nodes: point for point in points if point.mode == modes[0]}
    comparisons = [compare(bases[point.nodes], point) for point in points if point.mode != modes[0]]
    config = configs[0]
    texts = [*assumed, *_in_no_mode(config, [run for _, run in runs]), *assumptions(config)]
    return SimResult(titled(config), config.model_dump(mode="json"), texts, points, comparisons)


def on_nodes(config: AnyConfig, counts: Sequence[int]) -> list[AnyConfig]:
    """The configuration on each number of nodes (none: its own)."""
    clusters = [config.cluster.model_copy(update={"nodes": count}) for count in counts]
    return [config.model_copy(update={"cluster": cluster}) for cluster in clusters] or [config]


def pre_rolls(mode: str) -> bool:
    """Whether idle replicas pre-roll in this mode."""
    return mode.endswith("pre")


def in_mode(config: SimConfig, mode: str) -> SimConfig:
    """`config` as `mode`. Raises ConfigError for a mode that is none, or cannot be."""
    if mode not in MODES:
        raise ConfigError.of("--compare", mode, f"must be some of {', '.join(MODES)}")
    spec = config.rollout.speculation
    trains = False
    if mode in ("off", "pre"):
        spec = spec.model_copy(update={"drafter": "none"})
    elif mode == "suffix":
        spec = spec.model_copy(update={"drafter": "suffix"})
    elif spec.trained is None:
        allowed = f"must be a trained drafter for --compare {mode}"
        raise ConfigError.of("rollout.speculation.drafter", spec.drafter, allowed)
    else:
        trains = mode != "frozen"
    changed: dict[str, Any] = {
        "rollout": config.rollout.model_copy(update={"speculation": spec}),
        "idle": config.idle.model_copy(update={"train_drafter": trains, "pre_rollout": pre_rolls(mode)}),
    }
    new = config.model_copy(update=changed)
    if problems := list(check_sim(new)):
        raise ConfigError(problems)
    return new


def _in_no_mode(config: SimConfig, compared: Sequence[SimConfig]) -> Iterator[str]:
    """Settings of `idle` that each of the `compared` modes has replaced, a sentence each."""
    for name in ("pre_rollout", "train_drafter"):
        value = getattr(config.idle, name)
        if value != "auto" and all(getattr(run.idle, name) != value for run in compared):
            yield f"none of the compared modes has idle.{name} = {str(value).lower()}"


def titled(config: SimConfig) -> str:
    """The configuration's name with the model's size and the GPU that were simulated, whatever the name says."""
    gpu = config.cluster.gpu.upper()
    model = config.model
    return f"{config.name}: {model.family}, {total_parameters(model) / 1e9:.3g} billion parameters, on {gpu}"


def compare(base: Point, point: Point) -> Comparison:
    """How much faster `point` is than `base`."""
    saved = (base.seconds - point.seconds) * base.gpus * 100 / 3600
    rollout = base.mean.phases["rollout"] / max(point.mean.phases["rollout"], 1e-12)
    return Comparison(base.nodes, point.mode, base.mode, base.seconds / point.seconds, rollout, saved)


def assumptions(config: SimConfig) -> list[str]:
    """The assumptions, a sentence each."""
    lengths, training = config.workload.lengths, config.training
    lines = []
    if lengths.path is not None or lengths.values:
        responses = f"responses are as long as in {lengths.path or 'the given values'}"
    else:
        responses = f"responses are lognormal: median {lengths.median:g} tokens, sigma {lengths.sigma:g}"
    cut, count = Lengths(config).cut(config.workload.steps)
    at = f"rollout.max_tokens, {config.rollout.max_tokens}"
    lines.append(f"{responses}; {f'{cut:,}' if cut else 'none'} of the {count:,} simulated are cut at {at}")
    c = config.costs
    lines.append(
        f"engine steps are the embedded engine's in bf16, by a roofline: {c.bandwidth_efficiency:.0%} of the "
        f"bandwidth, {c.compute_efficiency:.0%} of the peak, {c.step_ms:g} ms a step, {c.speculation_ms:g} ms with "
        "drafts"
    )
    teacher = "" if training.teacher is None else " and one of the teacher"
    lines.append(
        f"update of {2 * weight_passes(training)} operations a parameter and token, attention besides, and "
        f"{training.logprob_passes} passes{teacher} before it, at {training.mfu:.0%} of the peak; responses "
        "without a gradient, which a run leaves out of its update, are in it"
    )
    if config.idle.train_drafter or config.rollout.speculation.trained:
        lines.append(
            f"an update of the policy undoes {training.drift:.0%} of the drafter's adaptation; "
            f"{training.tokens_to_adapt:g} tokens of training bring it to 63 %"
        )
    rolled = config.pre_rollouts
    lines.append(
        f"pre-rollouts: an update makes each token another one with a chance of {rolled.hazard:g}; behind a mismatch "
        f"the place is found with {rolled.found:g} a token, and lost with {rolled.found_hazard:g}"
    )
    lines.append("drafters estimate the acceptance of each token without error (calibrated)")
    return lines

"""Ways of running that a simulation compares, and sweeps over the number of nodes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_tlt.config.checks.sim import check_sim
from megatron_tlt.config.planning.parameters import total_parameters
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.cluster import weight_passes
from megatron_tlt.sim.limits import check_limits
from megatron_tlt.sim.result import Comparison, Point, SimResult
from megatron_tlt.sim.simulate import Simulation
from megatron_tlt.sim.trace import Lengths

MODES = {
    "off": "no drafts, no training of a drafter",
    "suffix": "drafts from sibling and earlier responses only",
    "frozen": "the file's drafter, never trained during the run",
    "tlt": "the file's drafter, trained in idle time",
    "pre": "pre-rollouts in idle time, no drafter",
    "tlt+pre": "pre-rollouts in idle time, and the file's drafter, trained there as the idle policy says",
}


def simulate(
    config: SimConfig, modes: Sequence[str], nodes: Sequence[int] = (), assumed: Sequence[str] = ()
) -> SimResult:
    """All modes on all numbers of nodes (none: the file's). The first mode is the baseline of the comparisons.
    `assumed`: what was assumed to make `config` of a run's (`from_run`).

    Raises ConfigError with every problem found.
    """
    counts = list(nodes) or [config.cluster.nodes]
    configs = {
        (count, mode): in_mode(config, mode, count) for count in counts for mode in modes
    }  # all are checked before the first is run
    if problems := list(check_limits(list(configs.values()))):
        raise ConfigError(problems)
    points = {key: Simulation(of).run(key[1]) for key, of in configs.items()}
    comparisons = [compare(points[count, modes[0]], points[count, mode]) for count in counts for mode in modes[1:]]
    ordered = list(points.values())
    texts = [*assumed, *assumptions(config)]
    return SimResult(titled(config), config.model_dump(mode="json"), texts, ordered, comparisons)


def in_mode(config: SimConfig, mode: str, nodes: int) -> SimConfig:
    """`config` as `mode` on `nodes` nodes. Raises ConfigError for a mode that is none, or cannot be."""
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
        "cluster": config.cluster.model_copy(update={"nodes": nodes}),
        "rollout": config.rollout.model_copy(update={"speculation": spec}),
        "idle": config.idle.model_copy(update={"train_drafter": trains, "pre_rollout": mode.endswith("pre")}),
    }
    new = config.model_copy(update=changed)
    if problems := list(check_sim(new)):
        raise ConfigError(problems)
    return new


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
        f"engine steps by a roofline: {c.bandwidth_efficiency:.0%} of the bandwidth, "
        f"{c.compute_efficiency:.0%} of the peak, {c.step_ms:g} ms a step, {c.speculation_ms:g} ms with drafts"
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

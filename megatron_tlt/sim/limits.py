"""Limits checked before a simulation starts: a model must fit its GPU, and the work is bounded. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_tlt.config.planning.parameters import total_parameters
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.sim.cost_model import ELEMENT, GPUS, cache_tokens

MAX_RESPONSES = 4_000_000  # of all steps of all points, at about 150 us of one CPU core each
_OF_AN_ENGINE = 5  # responses that take as long as one engine's rollout without any


def check_limits(configs: Sequence[SimConfig]) -> Iterator[ConfigProblem]:
    """Problems of the points that are to be simulated one after another."""
    yield from _check_memory(configs[0])
    work = sum(map(_work, configs))
    if work > MAX_RESPONSES:
        most = max(configs, key=_work)
        allowed = (
            f"too large to simulate: {_engines(most):,} engines and {_responses(most):,} responses a step for "
            f"{most.workload.steps:,} steps, {len(configs)} points in all, are {work / MAX_RESPONSES:,.1f} times the "
            "limit of about ten minutes; take fewer nodes, prompts, steps or points"
        )
        yield ConfigProblem("cluster.nodes", most.cluster.nodes, allowed)


def _check_memory(config: SimConfig) -> Iterator[ConfigProblem]:
    """Whether an engine has room for its weights and one longest response."""
    room = cache_tokens(config)
    model = config.model
    needed = config.workload.prompt_tokens + config.rollout.max_tokens
    if room is None or model is None or room >= needed:
        return
    gpu, tp = config.cluster.gpu, config.rollout.tp
    memory = GPUS[gpu].memory * config.cluster.memory_share
    weights = ELEMENT * total_parameters(model) / tp
    allowed = (
        f"the model does not fit: {tp} {gpu.upper()} of {memory / 1e9:.0f} usable GB each hold {weights / 1e9:.0f} GB "
        f"of weights each and a KV cache of {max(0, room):,} tokens; one longest response needs {needed:,}"
    )
    yield ConfigProblem("rollout.tp", tp, allowed)


def _responses(config: SimConfig) -> int:
    return config.workload.prompts_per_step * config.rollout.samples_per_prompt


def _engines(config: SimConfig) -> int:
    return config.cluster.nodes * config.cluster.gpus_per_node // config.rollout.tp


def _work(config: SimConfig) -> int:
    """One point's work, in responses."""
    return config.workload.steps * (_responses(config) + _OF_AN_ENGINE * _engines(config))

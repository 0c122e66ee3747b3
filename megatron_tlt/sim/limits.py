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
    config = min(configs, key=cache_tokens)
    room, needed = cache_tokens(config), config.workload.prompt_tokens + config.rollout.max_tokens
    if room < needed:
        tp, memory = config.rollout.tp, GPUS[config.cluster.gpu].memory * config.cluster.memory_share
        allowed = (
            f"the model does not fit: {tp} {config.cluster.gpu.upper()} of {memory / 1e9:.0f} usable GB each hold "
            f"{ELEMENT * total_parameters(config.model) / tp / 1e9:.0f} GB of weights each and a KV cache of "
            f"{max(0, room):,} tokens; one longest response needs {needed:,}"
        )
        yield ConfigProblem("rollout.tp", tp, allowed)
    if (work := sum(map(_work, configs))) > MAX_RESPONSES:
        allowed = (
            f"too large to simulate: {len(configs)} points are {work / MAX_RESPONSES:,.1f} times the limit of about "
            "ten minutes; take fewer nodes, prompts, steps or points"
        )
        yield ConfigProblem("cluster.nodes", max(c.cluster.nodes for c in configs), allowed)


def _work(config: SimConfig) -> int:
    """One point's work, in responses."""
    engines = config.cluster.nodes * config.cluster.gpus_per_node // config.rollout.tp
    responses = config.workload.prompts_per_step * config.rollout.samples_per_prompt
    return config.workload.steps * (responses + _OF_AN_ENGINE * engines)

"""What is refused before a simulation starts: a model that does not fit its GPU, and more work than some minutes.

The limits are about ten minutes of one CPU core and 2 GiB of memory. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_tlt.config.planning.parameters import total_parameters
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.sim.cost_model import ELEMENT, GPUS, cache_tokens

MAX_SECONDS = 600.0  # predicted CPU seconds of all points
MAX_ANSWERS = 4_000_000  # of one step: about 0.5 KB each
_RESPONSE_SECONDS = 20e-6  # measured: a response that runs from the start; an engine takes as long as five responses
_QUEUED_SECONDS = 150e-6  # measured: a response that waits for a place;
_QUEUE = 16_384  # of so many requests of an engine it takes twice as long


def check_limits(configs: Sequence[SimConfig]) -> Iterator[ConfigProblem]:
    """Problems of the points that are to be simulated one after another."""
    yield from _check_memory(configs[0])
    largest = max(configs, key=_responses)
    if _responses(largest) > MAX_ANSWERS:
        allowed = f"at most {MAX_ANSWERS:,} responses of a step can be simulated, not {_responses(largest):,}"
        yield ConfigProblem("workload.prompts_per_step", largest.workload.prompts_per_step, allowed)
        return
    seconds = sum(map(_seconds, configs))
    if seconds > MAX_SECONDS:
        slowest = max(configs, key=_seconds)
        responses = _responses(slowest) * slowest.workload.steps
        allowed = (
            f"too large to simulate: {_engines(slowest):,} engines and {responses:,} responses in "
            f"{slowest.workload.steps} "
            f"steps, {len(configs)} points in all, would take about {seconds / 60:,.0f} minutes "
            f"(limit {MAX_SECONDS / 60:.0f}); take fewer nodes, prompts, steps or points"
        )
        yield ConfigProblem("cluster.nodes", slowest.cluster.nodes, allowed)


def _check_memory(config: SimConfig) -> Iterator[ConfigProblem]:
    """Whether an engine has room for its weights and one longest response."""
    room, model = cache_tokens(config), config.model
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


def _seconds(config: SimConfig) -> float:
    """Predicted CPU seconds of one point."""
    responses, engines = _responses(config), _engines(config)
    requests = responses / engines
    room = cache_tokens(config)
    tokens = requests * (config.workload.prompt_tokens + config.workload.lengths.median)
    each = _RESPONSE_SECONDS
    if requests > config.rollout.max_running_requests or (room is not None and tokens > room):
        each = _QUEUED_SECONDS * (1 + requests / _QUEUE)
    return config.workload.steps * (5 * engines * _RESPONSE_SECONDS + responses * each)

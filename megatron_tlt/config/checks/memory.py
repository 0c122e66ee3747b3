"""Checks of the memory plan: the limits of devices, of hosts and of captured graphs."""

from __future__ import annotations

from megatron_tlt.config.checks.layout import Device, resolve_device
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning import graphs
from megatron_tlt.config.planning.memory import PHASES, RankMemory, estimate_memory, node_host_bytes
from megatron_tlt.config.planning.parameters import GIB, MIB
from megatron_tlt.config.root import Config, TrainingConfig
from megatron_tlt.errors import ConfigProblem, Problems


def check_memory(
    config: TrainingConfig, shape: ArchitectureConfig, num_ranks: int, device: Device | None = None
) -> list[ConfigProblem]:
    """Graphs that their budget has no room for; nodes whose ranks need more than `cluster.host_gib`; the fullest stage,
    if a rank needs more than `cluster.memory_gib`.
    """
    stages = estimate_memory(config, shape, num_ranks, device)
    problems = [] if config.rl is None else list(_check_graphs(config.rl, shape, device))
    problems += _check_host(config, stages)
    limit = config.cluster.memory_gib
    if limit is None:
        return problems
    worst = max(stages, key=lambda stage: stage.total)
    if worst.total <= limit * GIB:
        return problems
    phase = worst.fullest
    there = {name: size for name, size in worst.parts.items() if phase in worst.only.get(name, PHASES)}
    needs = f"needs {worst.total / GIB:.1f} GiB in the {phase}, {worst.total / GIB - limit:.1f} too many"
    allowed = f"a rank of pipeline stage {worst.stage} {needs} ({_largest(there)}, ...)"
    return [*problems, ConfigProblem("cluster.memory_gib", limit, allowed)]


def _check_host(config: TrainingConfig, stages: list[RankMemory]) -> Problems:
    cluster = config.cluster
    needed = node_host_bytes(stages, cluster.ranks_per_node)
    if needed > cluster.host_gib * GIB:
        fullest = max(stages, key=lambda stage: sum(stage.host.values()))
        needs = f"{cluster.ranks_per_node} ranks of a node need {needed / GIB:.1f} GiB of its host's memory"
        needs += f", {needed / GIB - cluster.host_gib:.1f} too many"
        allowed = f"{needs} (a rank: {_largest(fullest.host)}, ...)"
        yield ConfigProblem("cluster.host_memory_gib", cluster.host_gib, allowed)


def _largest(parts: dict[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)


def _check_graphs(config: Config, shape: ArchitectureConfig, device: Device | None) -> Problems:
    """The budget holds the buffers of all graphs and the temporary memory of the largest."""
    least, budget = -(-graphs.least_graph_bytes(config, shape) // MIB), config.rollout.graph_memory_mib
    if graphs.has_graphs(config, resolve_device(config, device) or "cpu") and budget < least:
        allowed = f"must be >= {least}: buffers of {graphs.graph_rows(config)} rows and a forward's temporary memory"
        yield ConfigProblem("rollout.graph_memory_mib", budget, allowed)

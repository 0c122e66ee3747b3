"""Cross-checks of a simulation."""

from __future__ import annotations

from megatron_tlt.config.checks.layout import node_problems, tp_problems
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigProblem, Problems


def check_sim(config: SimConfig) -> Problems:
    """Fields that contradict each other or the model."""
    if config.rollout.carry_over is not None:
        allowed = "must be null in a simulation, whose steps finish their responses"
        yield ConfigProblem("rollout.carry_over", config.rollout.carry_over, allowed)
    yield from _check_layout(config)
    if config.workload.lengths.path is not None and config.workload.lengths.values:
        allowed = "not with workload.lengths.values: one of them must be null or []"
        yield ConfigProblem("workload.lengths.path", config.workload.lengths.path, allowed)
    suffix, trained = config.drafters.suffix, config.drafters.trained
    if suffix.stale_rates:
        allowed = "must be []: suffix drafts are not trained"
        yield ConfigProblem("drafters.suffix.stale_rates", list(suffix.stale_rates), allowed)
    all_rates = {"suffix.rates": suffix.rates, "trained.rates": trained.rates}
    if trained.stale_rates:
        all_rates["trained.stale_rates"] = trained.stale_rates
    for name, rates in all_rates.items():
        if not rates or any(not 0 <= rate < 1 for rate in rates):
            yield ConfigProblem(f"drafters.{name}", list(rates), "must be numbers >= 0 and < 1, one at least")


def _check_layout(config: SimConfig) -> Problems:
    """An engine's size that does not divide the GPUs, a node's, or the model."""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    path, tp, gpus = "rollout.tp", config.rollout.tp, nodes * per_node
    if gpus % tp:
        yield ConfigProblem(path, tp, f"must divide the {gpus} GPUs")
    else:
        yield from node_problems(nodes, "cluster.gpus_per_node", per_node, path, tp)
    yield from tp_problems(config.model, path, tp)

"""Cross-checks of a simulation."""

from __future__ import annotations

from megatron_tlt.config.sim import AcceptanceSection, SimConfig
from megatron_tlt.errors import ConfigProblem, Problems


def check_sim(config: SimConfig) -> Problems:
    """Fields that contradict each other or the model."""
    measured = config.training
    known = measured.update_us_per_token is not None and measured.push_seconds is not None
    if config.model is None and not (config.costs.table and known and measured.micro_step_ms is not None):
        needed = "needs a shape, or costs.table and training.update_us_per_token, push_seconds and micro_step_ms"
        yield ConfigProblem("model", None, needed)
    if config.cluster.gpu == "cpu" and config.costs.table is None:
        yield ConfigProblem("cluster.gpu", "cpu", "needs costs.table: there is no roofline of a CPU")
    if config.rollout.carry_over is not None:
        allowed = "must be null in a simulation, whose steps finish their responses"
        yield ConfigProblem("rollout.carry_over", config.rollout.carry_over, allowed)
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    for path, size in (("rollout.tp", config.rollout.tp), ("training.tp", measured.tp)):
        if gpus % size:
            yield ConfigProblem(path, size, f"must divide the {gpus} GPUs")
    if gpus % (block := measured.tp * measured.pp * measured.cp):
        yield ConfigProblem("training.pp", measured.pp, f"tp x pp x cp = {block} must divide the {gpus} GPUs")
    if config.workload.lengths.path is not None and config.workload.lengths.values:
        allowed = "not with workload.lengths.values: one of them must be null or []"
        yield ConfigProblem("workload.lengths.path", config.workload.lengths.path, allowed)
    for name in ("suffix", "trained"):
        section: AcceptanceSection = getattr(config.drafters, name)
        for field in ("rates", "stale_rates"):
            rates: tuple[float, ...] = getattr(section, field)
            if any(not 0 <= rate < 1 for rate in rates) or (field == "rates" and not rates):
                allowed = "must be numbers >= 0 and < 1, one at least"
                yield ConfigProblem(f"drafters.{name}.{field}", list(rates), allowed)

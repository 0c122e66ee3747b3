"""The simulator held against figures that others published and against the quickstart as measured here.

One set of assumptions for all points: `config.sim`'s defaults and configs/sim/*.yaml. Three constants were set by
published figures, and the points they come from are marked "input": `bandwidth_efficiency` and `step_ms` by TLT's table
2 without drafts, `speculation_ms` and `pass_ms` by how its figure 13 grows with depth at 16 tokens to verify. So was
one of the workload: the median response, by the published share of rollout in a step (85 %; it is 80 % since updates
count attention). All others are predictions. Sources: arXiv 2511.16665 (TLT), by its tables' and figures' numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_tlt.config.load import load_config
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.sim import SimConfig, SimCostSection
from megatron_tlt.sim.cost_model import GPUS, Roofline
from megatron_tlt.sim.modes import in_mode
from megatron_tlt.sim.result import Point
from megatron_tlt.sim.simulate import Simulation
from megatron_tlt.sim.tables import columns

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks/results/quickstart-measured.json"
WINDOWS = ROOT / "benchmarks/results/idle-windows-cpu-avx2.json"

TABLE2 = {
    "b200": (259.71, 605.05),
    "h100": (164.65, 430.24),
    "a100": (92.83, 259.01),
    "rtx5090": (100.89, 293.84),
    "rtx4090": (65.28, 187.44),
    "rtx3090": (51.75, 166.41),
}
"""Qwen2.5-7B, one request: tokens/s without and with drafts."""
TABLE4_BATCHES = (1, 2, 4, 8, 16, 32)
TABLE4 = {
    16: (3.22, 3.08, 3.01, 2.73, 2.67, 2.48),
    32: (3.46, 3.28, 3.09, 2.63, 2.52, 2.23),
    48: (3.56, 3.39, 3.13, 2.51, 2.24, 1.90),
    64: (3.62, 3.38, 2.98, 2.27, 1.91, 1.70),
}
"""Qwen2.5-32B on 4 H100: times as fast, by tokens to verify and requests; depth 10, top 8."""
FIGURE13_DEPTH10 = {16: 6.80, 32: 7.63, 48: 7.97, 64: 8.21}
"""Tokens a step by tokens to verify, of the same set-up."""
FIGURE13_DEPTHS = {4: (4.63, 2.71), 8: (6.34, 3.19), 16: (7.25, 2.94)}
"""By depth: tokens a step and times as fast, 16 tokens to verify, one request."""
TABLE3_7B = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
TABLE3_32B = {4: 1.83, 8: 2.12}
TLT_BASE = {"7b": 1.41, "32b": 1.54}
"""Figure 11, H100: VeRL with the model-free drafter."""
FIGURE14 = 2.44
ROLLOUT_SHARE = 0.85
ACCEPT_7B = 6.53
"""Table 6, adapted during RL."""


@dataclass(frozen=True, slots=True)
class Check:
    """One published or measured figure and the simulated one."""

    source: str
    what: str
    reference: float
    simulated: float
    kind: str = "prediction"

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated / self.reference - 1


def validate() -> list[Check]:
    """All points; those of the quickstart only in a checkout, which has its measured figures."""
    checks = [*table2(), *figure13(), *table4(), *steps_by_nodes(), *figure14()]
    if MEASURED.exists():
        checks += quickstart()
    return checks


def paper(name: str) -> SimConfig:
    """A set-up of configs/sim, its paths counted from the checkout."""
    config = load_config(ROOT / f"configs/sim/{name}.yaml", (), SimConfig)
    if config.costs.table is None:
        return config
    costs = config.costs.model_copy(update={"table": str(ROOT / config.costs.table)})
    return config.model_copy(update={"costs": costs})


def table2() -> Iterator[Check]:
    """One request on one GPU, with and without drafts of 8 tokens, 48 to verify."""
    config = paper("paper-7b")
    model = _model(config)
    for name, (plain, drafted) in TABLE2.items():
        costs = Roofline(model, GPUS[name], 1, SimCostSection())
        seconds = costs.step(1, 1, 1000.0, False)
        yield Check("table 2", f"{name}, tokens/s without drafts", plain, 1 / seconds, "input")
        seconds = costs.step(1, 48, 1000.0, True) + costs.draft("trained", 1, 8, 47)
        yield Check("table 2", f"{name}, tokens/s with drafts", drafted, ACCEPT_7B / seconds)


def _speedup(costs: Roofline, batch: int, depth: int, verify: int, accepted: float) -> float:
    """Times as fast as plain decoding at contexts of 1000 tokens."""
    cached = 1000.0 * batch
    plain = costs.step(batch, batch, cached, False)
    drafted = costs.step(batch, batch * verify, cached, True) + costs.draft("trained", batch, depth, 0)
    return accepted * plain / drafted


def _study() -> Roofline:
    return Roofline(_model(paper("paper-32b")), GPUS["h100"], 4, SimCostSection())


def figure13() -> Iterator[Check]:
    """One request, by depth."""
    for depth, (accepted, published) in FIGURE13_DEPTHS.items():
        simulated = _speedup(_study(), 1, depth, 16, accepted)
        yield Check("figure 13", f"32B, depth {depth}, 16 to verify", published, simulated, "input")


def table4() -> Iterator[Check]:
    """By tokens to verify and requests; tokens a step are figure 13's."""
    for verify, row in TABLE4.items():
        for batch, published in zip(TABLE4_BATCHES, row, strict=True):
            simulated = _speedup(_study(), batch, 10, verify, FIGURE13_DEPTH10[verify])
            yield Check("table 4", f"32B, {verify} to verify, {batch} requests", published, simulated)


def steps_by_nodes() -> Iterator[Check]:
    """Table 3, figure 11's TLT-Base, and the share of rollout."""
    for name, published in (("7b", TABLE3_7B), ("32b", TABLE3_32B)):
        config = paper(f"paper-{name}")
        for nodes, speedup in published.items():
            base = _run(config, "off", nodes)
            simulated = base.seconds / _run(config, "tlt", nodes).seconds
            yield Check("table 3", f"{name.upper()}, {nodes} nodes, e2e", speedup, simulated)
            if nodes == 8:
                suffix = base.seconds / _run(config, "suffix", nodes).seconds
                yield Check(
                    "figure 11", f"{name.upper()}, 8 nodes, model-free drafter", TLT_BASE[name], suffix
                )
                share = base.phases["rollout"] / base.seconds
                kind = "input" if name == "7b" else "prediction"
                yield Check(
                    "text", f"{name.upper()}, share of rollout without drafts", ROLLOUT_SHARE, share, kind
                )


def figure14() -> Iterator[Check]:
    """One engine of 4 GPUs with 128 requests; drafts from 32 requests down, by an adapted drafter."""
    config = paper("paper-32b")
    changed: dict[str, Any] = {
        "cluster": config.cluster.model_copy(update={"nodes": 1, "gpus_per_node": 4}),
        "workload": config.workload.model_copy(update={"prompts_per_step": 16}),
        "training": config.training.model_copy(update={"tp": 4, "start_quality": 1.0, "drift": 0.0}),
    }
    config = config.model_copy(update=changed)
    base, drafted = (_run(config, mode, 1).phases["rollout"] for mode in ("off", "frozen"))
    yield Check("figure 14", "32B, 128 requests, rollout", FIGURE14, base / drafted)


def quickstart() -> list[Check]:
    """The CPU quickstart: mean seconds of a step and of its rollout, by mode.

    What follows the rollout does the same work in every mode (the responses are the same), so of its seconds each
    step's median over the modes is taken: the machine was not quiet.
    """
    modes = json.loads(MEASURED.read_text(encoding="utf-8"))["modes"]
    config = paper("quickstart")
    rests = [[step["seconds"] - step["rollout"] for step in mode["steps"]] for mode in modes.values()]
    rest = mean(median(of) for of in zip(*rests, strict=True))
    checks = []
    for name, mode in modes.items():
        rollout = mean(step["rollout"] for step in mode["steps"])
        point = _run(config, name, 1)
        checks.append(Check("quickstart", f"{name}, seconds of a step", rollout + rest, point.seconds))
        simulated = point.phases["rollout"]
        checks.append(Check("quickstart", f"{name}, seconds of a rollout", rollout, simulated))
    return [*checks, _recovered(config)]


def _recovered(config: SimConfig) -> Check:
    """The share of idle seconds that are trained in, against `bench_idle.py`'s record of 12 steps."""
    measured = json.loads(WINDOWS.read_text(encoding="utf-8"))["summary"]["recovered"]
    point = _run(config, "tlt", 1)
    share = point.recovered_gpu_hours / point.idle_gpu_hours
    return Check("idle windows", "quickstart, share of idle seconds trained in", measured, share)


def render_points(checks: list[Check]) -> str:
    """A line a point with its error, and the median error of each source."""
    rows = [["source", "what", "reference", "simulated", "error", "kind"]]
    for c in checks:
        rows.append([c.source, c.what, f"{c.reference:.3g}", f"{c.simulated:.3g}", f"{c.error:+.1%}", c.kind])
    lines = [columns(rows), ""]
    for source in dict.fromkeys(c.source for c in checks):
        errors = sorted(abs(c.error) for c in checks if c.source == source and c.kind == "prediction")
        if errors:
            text = f"median {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%} of {len(errors)}"
            lines.append(f"{source}: absolute errors of predictions: {text}")
    return "\n".join(lines)


def _run(config: SimConfig, mode: str, nodes: int) -> Point:
    return Simulation(in_mode(config, mode, nodes)).run(mode)


def _model(config: SimConfig) -> ArchitectureConfig:
    assert config.model is not None
    return config.model

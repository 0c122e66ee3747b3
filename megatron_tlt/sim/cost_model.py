"""Seconds of an engine step: a roofline of model and GPU, or a table measured on a real engine. Torch-free.

The roofline of a forward of T rows over B requests with C cached tokens in all, on one of t tensor-parallel GPUs:

    bytes   = 2 (weights without the embedding) / t + C * (KV bytes a token) / t
    flops   = 2 (weights without the embedding) * T / t + 4 L * (query width) * C * (T / B) / t
    seconds = sqrt((bytes / bandwidth)^2 + (flops / peak)^2) + all-reduces + a constant

The root of squares stands for the imperfect overlap of reading and computing near the ridge; bandwidth and peak are the
data sheet's times an efficiency. All constants are in `config.sim.SimCostSection`, the same for every GPU and model.

Legend: B requests, T rows (roots and drafted tokens), C cached tokens of all requests, L layers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.config.checks.layout import contradictions
from megatron_tlt.config.drafter_kinds import DRAFTERS, DrafterFacts
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import (
    decoder_parameters,
    expert_parameters,
    total_parameters,
)
from megatron_tlt.config.sim import SimConfig, SimCostSection
from megatron_tlt.errors import ConfigError, ConfigProblem, Problems

ELEMENT = 2  # bytes of bf16


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet: dense bf16 FLOP/s, memory bandwidth and the link within a node in bytes/s, memory in bytes."""

    flops: float
    bandwidth: float
    link: float
    memory: float


GPUS: dict[str, Gpu] = {
    "h100": Gpu(989e12, 3.35e12, 450e9, 80e9),
    "h200": Gpu(989e12, 4.8e12, 450e9, 141e9),
    "a100": Gpu(312e12, 2.039e12, 300e9, 80e9),
    "b200": Gpu(2250e12, 8.0e12, 900e9, 180e9),
    "rtx5090": Gpu(209e12, 1.792e12, 32e9, 32e9),
    "rtx4090": Gpu(165e12, 1.008e12, 32e9, 24e9),
    "rtx3090": Gpu(71e12, 0.936e12, 32e9, 24e9),
    "cpu": Gpu(1e11, 1e10, 1e10, 16e9),  # never priced: a CPU needs a measured table
}


class Roofline:
    """The formula above."""

    def __init__(
        self,
        model: ArchitectureConfig,
        gpu: Gpu,
        tp: int,
        section: SimCostSection,
        drafter: DrafterFacts = DRAFTERS["eagle"],
        draft_vocab_size: int | None = None,
    ):
        """`drafter` is the trained one, over `draft_vocab_size` tokens (None: all)."""
        self._model, self._gpu, self._tp, self._section = model, gpu, tp, section
        head = model.vocab_size * model.hidden_size
        self._dense = decoder_parameters(model, 0) + head
        self._expert = len(model.moe_layers) * expert_parameters(model, 1)  # one of each layer
        self._drafter = drafter
        self._pass_elements = drafter.read_elements(model, draft_vocab_size)
        self._token_elements = drafter.token_elements(model, draft_vocab_size)
        self._kv = kv_bytes(model) / tp
        self._width = model.num_heads * model.head_dim

    def step(self, B: int, T: int, C: float, speculating: bool) -> float:
        """Seconds of all but the draft: schedule, forward, sampling or verification, commit."""
        attention = 4.0 * self._model.num_layers * self._width * C * (T / max(1, B)) / self._tp
        seconds = self._policy(T, C * self._kv, attention)
        return seconds + 1e-3 * (self._section.step_ms + (self._section.speculation_ms if speculating else 0.0))

    def draft(self, kind: str, B: int, passes: int, tokens: int) -> float:
        """Seconds of proposing `tokens` tokens in all, `passes` of them one after the other by a trained drafter."""
        if kind == "suffix":
            return 1e-6 * self._section.lookup_us * B
        if not passes:
            return 0.0
        layers = self._drafter.cached_layers
        one = self._forward(self._pass_elements, B * self._drafter.rows, 0.0, 0.0, layers)
        bias = self._forward(self._token_elements, B, 0.0, 0.0, 0)
        one += self._drafter.rows * bias + 1e-3 * self._section.pass_ms  # a block's tokens are drawn one by one
        return self._drafter.passes(passes) * one

    def prefill(self, tokens: int) -> float:
        """Seconds of a step of prompt tokens only."""
        return self._policy(tokens, 0.0, 0.0) + 1e-3 * self._section.step_ms

    def _policy(self, T: int, kv: float, attention: float) -> float:
        """A forward of T rows. Of E experts each row computes with k, and all together read E (1 - (1 - k/E)^T)."""
        experts, chosen = self._model.num_experts, self._model.num_experts_per_tok
        read = experts * (1 - (1 - chosen / experts) ** T) if experts else 0
        active = self._dense + chosen * self._expert
        return self._forward(self._dense + read * self._expert, T, kv, attention, self._model.num_layers, active)

    def _forward(
        self, weights: float, T: int, kv: float, attention: float, layers: int, active: float | None = None
    ) -> float:
        """`weights` are read, `active` (default: those) are what each row computes with."""
        section, gpu = self._section, self._gpu
        operations = 2.0 * (weights if active is None else active)
        reading = (ELEMENT * weights / self._tp + kv) / (gpu.bandwidth * section.bandwidth_efficiency)
        computing = (operations * T / self._tp + attention) / (gpu.flops * section.compute_efficiency)
        return math.hypot(reading, computing) + self._reduce(T, layers)

    def _reduce(self, T: int, layers: int) -> float:
        """All-reduces of a tensor-parallel forward, two a layer (ring)."""
        if self._tp == 1:
            return 0.0
        volume = 2.0 * (self._tp - 1) / self._tp * T * self._model.hidden_size * ELEMENT
        return 2 * layers * (1e-6 * self._section.allreduce_us + volume / self._gpu.link)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a table was measured on."""

    model: ArchitectureConfig
    device: str  # a name of `GPUS`
    tp: int
    requests: int  # the most in a step
    cached_tokens: int  # the most of all requests of a step

    def problems(self, config: SimConfig) -> Problems:
        """What of `config` is another model or another engine."""
        yield from contradictions("model", config.model, self.model, "costs.table")
        pairs = ("cluster.gpu", config.cluster.gpu, self.device), ("rollout.tp", config.rollout.tp, self.tp)
        for path, value, there in pairs:
            if value != there:
                yield ConfigProblem(path, value, f"contradicts costs.table, which was measured with {there!r}")


class MeasuredCosts:
    """Lines fitted to a real engine's steps by `tools/fit_cost_model.py`; the file says on which machine.

    A plain step: c0 + cB B + cC C; one with drafts: c0 + cB B + cT T + cC C + cA C T / B (its rows look at C T / B
    positions); a draft of a kind: a + b B + c tokens; a prompt step: p0 + pT tokens.
    """

    def __init__(self, table: dict[str, Any], measured: Measured):
        self.measured = measured
        self._plain, self._verify = table["plain"], table["verify"]
        self._drafts, self._prefill = table["drafts"], table["prefill"]

    @classmethod
    def load(cls, path: str) -> MeasuredCosts:
        """Reads a table. Raises ConfigError, naming costs.table, if it is none."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            measured = dict(record["measured"])
            model = ArchitectureConfig.model_validate(measured.pop("model"))
            return cls(record["table"], Measured(model=model, **measured))
        except (OSError, ValueError, KeyError, TypeError) as error:
            allowed = f"must be a table written by tools/fit_cost_model.py: {error}"
            raise ConfigError.of("costs.table", str(Path(path).absolute()), allowed) from error

    def step(self, B: int, T: int, C: float, speculating: bool) -> float:
        """As `Roofline.step`."""
        if not speculating:
            c0, per_request, per_cached = self._plain
            return float(c0 + per_request * B + per_cached * C + self._prefill[1] * (T - B))
        c0, per_request, per_row, per_cached, per_attended = self._verify
        return float(c0 + per_request * B + per_row * T + per_cached * C + per_attended * C * T / max(1, B))

    def draft(self, kind: str, B: int, passes: int, tokens: int) -> float:
        """As `Roofline.draft`. Raises ConfigError for a kind that was not measured."""
        if kind not in self._drafts:
            raise ConfigError.of("costs.table", kind, f"measured were drafters {', '.join(self._drafts)}")
        base, per_request, per_token = self._drafts[kind]
        return float(base + per_request * B + per_token * tokens)

    def prefill(self, tokens: int) -> float:
        """As `Roofline.prefill`."""
        base, per_token = self._prefill
        return float(base + per_token * tokens)


CostModel = Roofline | MeasuredCosts


def kv_bytes(model: ArchitectureConfig) -> int:
    """Bytes of one cached token in all layers, over all tensor-parallel GPUs."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * ELEMENT


def build_costs(config: SimConfig) -> CostModel:
    """The configured cost model. Raises ConfigError."""
    if config.costs.table is not None:
        costs = MeasuredCosts.load(config.costs.table)
        if problems := list(costs.measured.problems(config)):
            raise ConfigError(problems)
        return costs
    assert config.model is not None, "checked by check_sim"
    drafted = config.rollout.speculation.draft_vocab_size
    gpu, drafter = GPUS[config.cluster.gpu], trained_drafter(config)
    return Roofline(config.model, gpu, config.rollout.tp, config.costs, drafter, drafted)


def trained_drafter(config: SimConfig) -> DrafterFacts:
    """The kind whose costs are taken; EAGLE where none is configured."""
    return config.rollout.speculation.trained or DRAFTERS["eagle"]


def cache_tokens(config: SimConfig) -> int | None:
    """Tokens that the KV cache of one engine holds; None: not known (no model: memory is taken to suffice)."""
    if config.rollout.kv_cache_mib is not None and config.model is not None:
        return int(config.rollout.kv_cache_mib * 2**20 * config.rollout.tp / kv_bytes(config.model))
    if config.model is None:
        return None
    gpu, tp = GPUS[config.cluster.gpu], config.rollout.tp
    free = gpu.memory * config.cluster.memory_share * tp - ELEMENT * total_parameters(config.model)
    return int(free / kv_bytes(config.model))

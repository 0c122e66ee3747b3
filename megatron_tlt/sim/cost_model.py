"""Seconds of an engine step by a roofline of model and GPU. Torch-free.

A forward of T rows over B requests with C cached tokens in all, on one of t tensor-parallel GPUs:

    bytes   = 2 (weights without the embedding) / t + C * (KV bytes a token) / t
    flops   = 2 (weights without the embedding) * T / t + 4 L * (query width) * C * (T / B) / t
    seconds = sqrt((bytes / bandwidth)^2 + (flops / peak)^2) + all-reduces + a constant

The root of squares stands for the imperfect overlap of reading and computing near the ridge; bandwidth and peak are the
data sheet's times an efficiency. All constants are in `config.sim.SimCostSection`, the same for every GPU and model.

Legend: B requests, T rows (roots and drafted tokens), C cached tokens of all requests, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_tlt.config.drafter_kinds import DRAFTERS, DrafterFacts
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import (
    decoder_parameters,
    expert_parameters,
    total_parameters,
)
from megatron_tlt.config.sim import SimConfig, SimCostSection

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

    def draft(self, kind: str, B: int, length: int) -> float:
        """Seconds of proposing up to `length` tokens for each request."""
        if kind == "suffix":
            return 1e-6 * self._section.lookup_us * B
        if not length:
            return 0.0
        layers = self._drafter.cached_layers
        one = self._forward(self._pass_elements, B * self._drafter.rows, 0.0, 0.0, layers)
        bias = self._forward(self._token_elements, B, 0.0, 0.0, 0)
        one += self._drafter.rows * bias + 1e-3 * self._section.pass_ms  # a block's tokens are drawn one by one
        return self._drafter.passes(length) * one

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


def kv_bytes(model: ArchitectureConfig) -> int:
    """Bytes of one cached token in all layers, over all tensor-parallel GPUs."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * ELEMENT


def build_costs(config: SimConfig) -> Roofline:
    """The configured cost model."""
    drafted_tokens = config.rollout.speculation.drafted_tokens(config.model.vocab_size)
    gpu, drafter = GPUS[config.cluster.gpu], trained_drafter(config)
    return Roofline(config.model, gpu, config.rollout.tp, config.costs, drafter, drafted_tokens)


def trained_drafter(config: SimConfig) -> DrafterFacts:
    """The kind whose costs are taken; EAGLE where none is configured."""
    return config.rollout.speculation.trained or DRAFTERS["eagle"]


def cache_tokens(config: SimConfig) -> int:
    """Tokens that the KV cache of one engine holds."""
    if config.rollout.kv_cache_mib is not None:
        return int(config.rollout.kv_cache_mib * 2**20 * config.rollout.tp / kv_bytes(config.model))
    gpu, tp = GPUS[config.cluster.gpu], config.rollout.tp
    free = gpu.memory * config.cluster.memory_share * tp - ELEMENT * total_parameters(config.model)
    return int(free / kv_bytes(config.model))

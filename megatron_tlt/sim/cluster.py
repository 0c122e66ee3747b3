"""Times outside the engines: update, weight sync, exchange, micro-step of drafter training. Torch-free.

Everything here is an estimate by size.
"""

from __future__ import annotations

import numpy as np

from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import active_parameters, total_parameters
from megatron_tlt.config.sim import SimConfig, SimTrainingSection
from megatron_tlt.sim.cost_model import ELEMENT, GPUS, trained_drafter


class Cluster:
    """Times of one configuration outside the engines, in seconds."""

    def __init__(self, config: SimConfig):
        self._config = config
        self.gpus = config.cluster.nodes * config.cluster.gpus_per_node
        self.replicas = self.gpus // config.rollout.tp
        self._gpu = GPUS[config.cluster.gpu]
        self._peak = self.gpus * self._gpu.flops * config.training.mfu

    def logprobs(self, lengths: np.ndarray) -> float:
        """Forward passes over sequences of all replicas, of so many tokens each, before the update."""
        model, training = self._config.model, self._config.training
        seconds = training.logprob_passes * self._passes(model, lengths)
        return seconds if training.teacher is None else seconds + self._passes(training.teacher, lengths)

    def update(self, lengths: np.ndarray) -> float:
        """Forward and backward over sequences of all replicas, of so many tokens each, and the optimizer."""
        training = self._config.training
        attention = 3 + training.recompute  # forward, again, and the gradients of both of its products' factors
        return self._passes(self._config.model, lengths, weight_passes(training), attention)

    def _passes(self, model: ArchitectureConfig, lengths: np.ndarray, weights: int = 1, attention: int = 1) -> float:
        """Seconds of so many times a forward's work: 2 operations a parameter and token in the products with `weights`,
        and causal `attention`'s 4 a layer, its width and pair of tokens.

        Each token looks at itself and those before it, half of its sequence on average.
        """
        size = lengths.astype(np.float64)
        pairs = float((size * (size + 1) / 2).sum())
        of_pairs = 4.0 * model.num_layers * model.num_heads * model.head_dim * pairs
        of_tokens = 2.0 * active_parameters(model) * float(size.sum())
        return (weights * of_tokens + attention * of_pairs) / self._peak

    def weight_sync(self) -> float:
        """New weights into every engine: a shard over the node's links, once over the network if there are nodes."""
        cluster = self._config.cluster
        shard = ELEMENT * total_parameters(self._config.model) / self._config.rollout.tp
        links = shard / self._gpu.link
        network = shard / (cluster.network_gbps * 1e9 / 8) if cluster.nodes > 1 else 0.0
        return links + network

    def exchange(self, size: int) -> float:
        """So many bytes to every rank."""
        return size / (self._config.cluster.network_gbps * 1e9 / 8)

    def micro_step(self) -> float:
        """One micro-step of drafter training on one replica: 6 operations a token and parameter that a pass reads, in
        as many passes as it drafts positions with. A block drafter has about as many rows of blocks as tokens.
        """
        training, model = self._config.training, self._config.model
        drafter, tokens = trained_drafter(self._config), training.micro_step_tokens
        read = drafter.read_elements(model, self._config.rollout.speculation.drafted_tokens(model.vocab_size))
        operations = 6.0 * read * drafter.passes(drafter.draft_steps(training.draft_steps)) * tokens
        return operations / (self._gpu.flops * training.mfu * self._config.rollout.tp) + 2e-3


def weight_passes(training: SimTrainingSection) -> int:
    """Times that an update multiplies with the weights: forward, gradients of activations and of weights, forward again
    where activations are recomputed. Frozen weights have no gradients; those of adapters are few.
    """
    return 2 + training.recompute + (not training.lora)

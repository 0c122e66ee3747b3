"""Tiny models, batches, losses and cases of the actor's tests. No megatron, no transformers at the top."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.config.algorithm import AlgorithmName
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory
from tests.helpers.tiny_models import hf_model

KINDS = ("qwen2", "qwen3", "llama")
MOE_KINDS = ("qwen3_moe", "qwen2_moe")  # the second with a dense layer and shared experts
LORA_KINDS = ("qwen2", "qwen2_moe")  # biases of q, k, v; experts, shared ones and a dense layer
LORA = {"rank": 4, "alpha": 8.0}
_SP = {"tp": 2, "sequence_parallel": True}
# By ranks: layouts with the forward that hands hidden states out. How ranks that share a response gather them is
# independent of it.
HIDDEN: dict[int, list[tuple[dict[str, Any], str]]] = {
    1: [({}, forward) for forward in ("update", "old log-probs", "scoring")],
    2: [({}, "update"), ({"pp": 2}, "scoring"), ({**_SP, "recompute": "full"}, "update"), ({"cp": 2}, "old log-probs")],
    4: [({**_SP, "pp": 2}, "update"), ({**_SP, "cp": 2}, "update")],
}
# Which responses an algorithm leaves out: tests/unit/algorithms and test_batch_assembly.py, for all of them.
ZERO_ADVANTAGES: dict[int, tuple[AlgorithmName, ...]] = {2: ("gspo",), 4: ("grpo",)}
VOCAB = 131  # prime: no TP size divides it, so every TP test also tests vocabulary padding
EXPERTS, CHOSEN = 8, 2  # as `tiny_models` has them
# Sizes that 4 ranks of any kind divide; one of four layers of qwen2_moe has no experts.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {"mlp_only_layers": [1], "tie_word_embeddings": False},
}


def save_model(kind: str, directory: Path) -> Any:
    """Writes the tiny model of `kind` as a Hugging Face directory and returns it."""
    model = hf_model(kind, **_SIZES, **_FIELDS.get(kind, {}))
    model.save_pretrained(directory)
    return model


def sequences(count: int, seed: int = 3, longest: int = 40) -> list[TrainSequence]:
    """Random sequences of uneven lengths, with advantages, partial masks and weights, many with given tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 12)), int(rng.integers(1, longest))
        mask = (rng.random(response) < 0.8).astype(np.float32)
        mask[0] = 1.0
        trajectory = Trajectory(
            prompt_id=i,
            sample_index=0,
            token_ids=rng.integers(0, VOCAB, prompt + response).astype(np.int32),
            logprobs=np.full(response, -4.5, np.float32),
            given=((2, 5), (9, 10)) if response > 10 else (),
        )
        sequence = TrainSequence.of(trajectory)
        sequence.advantages = rng.normal(size=response).astype(np.float32)
        sequence.loss_mask *= mask
        sequence.weight = float(rng.uniform(0.5, 1.5))
        made.append(sequence)
    return made


def shortened(all_sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Every second one cut to one token of its prompt and one or two of its response: fewer rows than 2 cp."""
    made = list(all_sequences)
    for i, s in enumerate(all_sequences):
        n = 1 + i // 2 % 2
        if i % 2 and len(s.loss_mask) >= n:
            t = s.trajectory
            tokens = t.token_ids[t.response_start - 1 :][: n + 1]
            short = replace(t, token_ids=tokens, logprobs=t.logprobs[:n], given=())
            made[i] = TrainSequence(short, s.advantages[:n], s.loss_mask[:n], s.weight)
    return made


def with_routed_experts(made: list[TrainSequence], layers: int) -> list[TrainSequence]:
    """The sequences with recorded experts, of which the routers would choose few; every third's first are unknown."""
    for trajectory in (sequence.trajectory for sequence in made):
        rng = np.random.default_rng(trajectory.prompt_id)
        shape = (trajectory.length - 1, layers, EXPERTS)
        trajectory.routed_experts = rng.random(shape).argsort(-1)[..., :CHOSEN].astype(np.int16)
        if trajectory.prompt_id % 3 == 0:
            trajectory.routed_experts[:2] = -1
    return made


def share(all_sequences: list[TrainSequence], dp: int, at: int) -> list[TrainSequence]:
    """What data-parallel rank `at` of `dp` trains on."""
    return all_sequences[at::dp]


def train_batch(
    mini_batches: list[list[TrainSequence]], denominators: list[float], temperature: float = 1.0
) -> TrainBatch:
    """A TrainBatch of these mini-batches."""
    return TrainBatch(mini_batches=mini_batches, denominators=denominators, temperature=temperature)


@dataclass
class WeightedNll:
    """-advantage * weight * logprob plus an entropy term: smooth, and every input matters."""

    entropy_factor: float = 0.01

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value = -(x.advantages * x.logprobs + self.entropy_factor * x.entropy) * x.weights * x.mask
        return value.sum(), {"negative": -(x.logprobs * x.mask).sum(), "worst_max": -x.logprobs.min()}


@dataclass
class ClippedRatio:
    """PPO's clipped objective with a k3 KL term to the reference and an entropy term."""

    kl: float = 0.1

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs
        ratio = (x.logprobs - old).exp()
        clipped = ratio.clamp(0.8, 1.28)
        policy = -torch.minimum(ratio * x.advantages, clipped * x.advantages)
        distance = x.ref_logprobs - x.logprobs
        kl = distance.exp() - distance - 1
        value = (policy + self.kl * kl - 0.01 * x.entropy) * x.weights * x.mask
        return value.sum(), {"ratio_max": ratio.detach().max()}


@dataclass
class Exploding:
    """A loss whose gradient is infinite."""

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (x.logprobs * x.mask).sum() * float("inf"), {}


class Products(TorchDispatchMode):
    """Collects `rows`, the numbers of rows of all matrix products of a forward in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and args[-1].dtype is torch.bfloat16:
            self.rows.add(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Largest |found - wanted| / |wanted| over tensors (Frobenius), and which tensor."""
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    errors = []
    for name, right in wanted.items():
        difference = (found[name].double() - right.double()).norm()
        errors.append((float(difference / right.double().norm().clamp_min(1e-30)), name))
    return max(errors)


def say(world: Any, **result: Any) -> None:
    """One JSON line from rank 0, for the test to read."""
    if world.is_main:
        print("RESULT " + json.dumps(result), flush=True)


def results(output: str) -> list[dict[str, Any]]:
    """The JSON lines of a worker's output."""
    return [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]

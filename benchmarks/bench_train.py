"""Policy update: MegatronPolicy against plain PyTorch (transformers, AdamW), same model, same sequences.

    python benchmarks/bench_train.py [--quick] [--moe] [--out r.json] [--threads 1 2] [--models demo 10M 38M 78M moe]

One update = forward, GRPO loss, backward, clipping, AdamW, on one rank. Plain PyTorch gets its best form:
right-padded batches with causal SDPA (needs no mask), the LM head on response rows only, fused
cross-entropy and AdamW. `equal` has sequences of one length, so nothing is padded and the ratio is overhead alone (this
is `vs_torch`); `uneven` has natural lengths. The two sides take turns (A B A B); medians. Both reuse
freed pages (`distributed/heap.py`). Policies of 38M and 78M parameters get 4 sequences a step in place of 32.
`--moe`: the policy `moe` alone, 32M parameters of which a token takes 10M, on one thread against the faster of
transformers' two forms of experts: a loop, and grouped products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lib.bench_record import write_record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.check import random_weights
from megatron_tlt.actor.compat import HAS_CUDA
from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.config.actor import ADAM_EPS, ActorSection, OptimizerSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.data.packing import pack_by_budget
from megatron_tlt.distributed.world import World
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory

MODELS = {
    "demo": ModelConfig("qwen3", 512, 128, 16, 4, 2, 32, 320, qk_norm=True, tie_word_embeddings=True),
    "10M": ModelConfig("qwen2", 4096, 320, 8, 5, 1, 64, 896, qkv_bias=True, tie_word_embeddings=True),
    "38M": ModelConfig("qwen3", 288, 512, 12, 16, 8, 32, 1536, qk_norm=True, tie_word_embeddings=True),
    "78M": ModelConfig("qwen3", 288, 768, 12, 24, 12, 32, 2048, qk_norm=True, tie_word_embeddings=True),
}
EXPERTS: dict[str, Any] = {  # as wide as the dense model for each token
    "family": "qwen3_moe",
    "qkv_bias": False,
    "qk_norm": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 224,
    "norm_topk_prob": True,
    "moe_layers": tuple(range(8)),
}
MODELS["moe"] = replace(MODELS["10M"], **EXPERTS)
SEQUENCES = {"demo": 32, "10M": 32, "38M": 4, "78M": 4, "moe": 8}  # a step
BUDGET = 2048


def make_sequences(kind: str, count: int, vocab: int) -> list[TrainSequence]:
    """`equal`: 32 + 224 tokens each. `uneven`: log-normal responses, the longest several times the median."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt = 32 if kind == "equal" else int(rng.integers(16, 48))
        response = 224 if kind == "equal" else int(np.clip(rng.lognormal(4.6, 0.8), 8, 1000))
        tokens = rng.integers(0, vocab, prompt + response)
        sequence = TrainSequence.of(Trajectory(i, 0, tokens, np.zeros(response, np.float32)))
        sequence.advantages += np.float32(rng.normal())
        made.append(sequence)
    return made


class Surrogate:
    """ratio * advantage with ratio = 1: the first step of GRPO."""

    def loss(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -((x.logprobs - x.logprobs.detach()).exp() * x.advantages * x.mask).sum(), {}


class PlainPolicy:
    """The same update in a page of PyTorch."""

    def __init__(self, directory: Path, section: OptimizerSection, **options: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", **options).train()
        betas = (section.beta1, section.beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), section.lr, betas, ADAM_EPS, fused=True)

    def train_step(self, batches: list[list[TrainSequence]], denominator: float) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, entropy_sum = 0.0, 0.0
        for batch in batches:
            logprobs, entropy, advantages = self._forward(batch)
            loss = -((logprobs - logprobs.detach()).exp() * advantages).sum() / denominator
            loss.backward()
            loss_sum, entropy_sum = loss_sum + float(loss.detach()), entropy_sum + float(entropy)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss_sum, "grad_norm": float(norm), "entropy": entropy_sum / denominator}

    def _forward(self, batch: list[TrainSequence]) -> tuple[Tensor, Tensor, Tensor]:
        trajectories = [s.trajectory for s in batch]
        longest = max(t.length for t in trajectories) - 1
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, t in enumerate(trajectories):
            ids[row, : t.length - 1] = torch.from_numpy(t.token_ids[:-1])
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        rows = torch.cat(
            [r * longest + torch.arange(t.response_start - 1, t.length - 1) for r, t in enumerate(trajectories)]
        )
        labels = torch.cat([torch.from_numpy(t.token_ids[t.response_start :]) for t in trajectories])
        advantages = torch.cat([torch.from_numpy(s.advantages) for s in batch])
        logits = self.model.lm_head(hidden.flatten(0, 1)[rows])
        with torch.no_grad():
            table = logits.log_softmax(-1)
            entropy = -(table.exp() * table).sum()
        return -F.cross_entropy(logits, labels, reduction="none"), entropy, advantages


def measure(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds per call, the sides taking turns; one warm-up each."""
    for call in sides.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def bench(world: World, model: str, kind: str, threads: int, count: int, repeats: int) -> dict[str, Any]:
    """One row: both sides on one model and workload."""
    torch.set_num_threads(threads)
    config = MODELS[model]
    section = OptimizerSection(lr=1e-4)
    sequences = make_sequences(kind, count, config.vocab_size)
    tokens, denominator = sum(s.trajectory.length for s in sequences), float(sum(len(s.advantages) for s in sequences))
    with tempfile.TemporaryDirectory() as scratch:
        save_hf(scratch, config, random_weights(config.parameter_shapes()).items())
        ours = MegatronPolicy(
            world, ModelSection(path=scratch), ActorSection(micro_batch_tokens=BUDGET), section, Surrogate(), 1000
        )
        forms = {"torch": {}}
        if config.num_experts:
            forms = {f"torch_{form}": {"experts_implementation": form} for form in ("eager", "grouped_mm")}
        plain = {name: PlainPolicy(Path(scratch), section, **options) for name, options in forms.items()}
    # Padded batches are limited by the same number of tokens, padding included, longest first.
    groups = (
        pack_by_budget([s.trajectory.length for s in sequences], BUDGET)
        if kind == "equal"
        else padded_groups(sequences)
    )
    batches = [[sequences[i] for i in group] for group in groups]
    batch = TrainBatch([sequences], [denominator])
    sides: dict[str, Callable[[], Any]] = {"megatron": lambda: ours.train_step(batch).metrics}
    sides |= {name: partial(policy.train_step, batches, denominator) for name, policy in plain.items()}
    agree = [call() for call in sides.values()]
    times = measure(sides, repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": model,
        "kind": kind,
        "threads": threads,
        "sequences": count,
        "tokens": tokens,
        **{f"{name}_s": value for name, value in medians.items()},
        **{f"{name}_{what.__name__}_s": what(values) for name, values in times.items() for what in (min, max)},
        "tokens_per_s": tokens / medians["megatron"],
        "ratio": min(medians[name] for name in plain) / medians["megatron"],
        "grad_norms": [m["grad_norm"] for m in agree],
    }


def padded_groups(sequences: list[TrainSequence]) -> list[list[int]]:
    """Sequences sorted by length, cut where the padded rectangle exceeds the budget."""
    groups: list[list[int]] = []
    for i in sorted(range(len(sequences)), key=lambda i: -sequences[i].trajectory.length):
        if groups and (len(groups[-1]) + 1) * sequences[groups[-1][0]].trajectory.length <= BUDGET:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="demo model, one thread, few repeats")
    parser.add_argument("--moe", action="store_true", help="the model moe, one thread")
    parser.add_argument("--out", type=Path)
    dense = [name for name in MODELS if name != "moe"]
    parser.add_argument("--models", nargs="+", default=dense, choices=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sequences", type=int, help="a step; otherwise by model")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.quick:
        args.models, args.threads, args.repeats = ["demo"], [1], 5
    if args.moe:
        args.models, args.threads = ["moe"], [1]
    if HAS_CUDA:
        raise SystemExit("this compares the CPU paths: hide the GPUs (CUDA_VISIBLE_DEVICES=), or run gpu_check.py")
    world = World.start(DistributedSection(device="cpu"))
    rows = []
    for model in args.models:
        for threads in args.threads:
            for kind in ("equal", "uneven"):
                count = args.sequences or SEQUENCES[model]
                row = bench(world, model, kind, threads, count, args.repeats)
                rows.append(row)
                print(
                    f"{model:5} {kind:6} {threads} threads  megatron {row['megatron_s'] * 1e3:8.1f} ms"
                    f"  torch {row['megatron_s'] * row['ratio'] * 1e3:8.1f} ms  ratio {row['ratio']:.2f}"
                    f"  {row['tokens_per_s']:7.0f} tok/s  grad norms {row['grad_norms']}",
                    flush=True,
                )
    summary = {
        "vs_torch": min(row["ratio"] for row in rows if row["kind"] == "equal"),
        "vs_torch_uneven": min(row["ratio"] for row in rows if row["kind"] == "uneven"),
        **{f"tokens_per_s_{row['model']}_{row['kind']}_{row['threads']}": row["tokens_per_s"] for row in rows},
    }
    print(summary)
    write_record(args.out, rows, summary)
    world.close()


if __name__ == "__main__":
    main()

"""A policy from nothing in minutes: 28 layers, 350M parameters, bf16, on the demo policy's traces.

Plain PyTorch on `transformers`' Qwen3 (the benchmark is about rollouts; training with Megatron is measured elsewhere).
Right-padded batches need no mask under causal attention; only the completion is learned, as in `megatron-tlt sft`.

Legend: B sequences, L padded length.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from demo_traces import generate  # noqa: E402
from make_demo_policy import VOCAB_SIZE, build_tokenizer, calm_residual_stream  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "full": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "smoke": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
_EXAMPLES = {"full": 400_000, "smoke": 400}
_BATCH_TOKENS = {"full": 65536, "smoke": 2048}
_PEAK_LR = {"full": 4e-4, "smoke": 3e-3}
_POOL = 2048  # examples sorted by length together
_WARMUP = 0.03  # share of the time

Encoded = list[tuple[list[int], int]]  # token ids and length of the prompt


def train_policy(folder: Path, device: torch.device, seconds: float, size: str) -> dict[str, Any]:
    """Trains for `seconds` and writes a Hugging Face directory. Returns what happened."""
    from transformers import Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(_config(tokenizer, size))
    calm_residual_stream(model)
    model.to(device)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    examples = _encode(tokenizer, _EXAMPLES[size])
    steps = tokens = 0
    losses: list[Tensor] = []
    started = time.perf_counter()
    for ids, labels in _batches(examples, _BATCH_TOKENS[size], device):
        done = (time.perf_counter() - started) / seconds
        if done >= 1:
            break
        rate = (
            _PEAK_LR[size] * min(1.0, done / _WARMUP + 0.01) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        )
        losses.append(_update(model, optimizer, ids, labels, rate))
        steps, tokens = steps + 1, tokens + ids.numel()
        if steps % 50 == 0:
            print(f"  {steps} steps, {tokens} tokens, loss {float(losses[-1]):.4f}", flush=True)
    return _save(folder, model, tokenizer) | {
        "train_seconds": time.perf_counter() - started,
        "train_steps": steps,
        "train_tokens": tokens,
        "loss": float(torch.stack(losses[-20:]).mean()),
    }


def _config(tokenizer: Any, size: str) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=SHAPES[size]["hidden_size"] ** -0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPES[size],
    )


def _encode(tokenizer: Any, count: int) -> Encoded:
    encoded = []
    for example in generate(count, seed=1):
        message = [{"role": "user", "content": example.prompt}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tokenizer.encode(example.completion, add_special_tokens=False)
        encoded.append(([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    return encoded


def _batches(examples: Encoded, budget: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled for ever, about equally long examples together: ids and labels [B, L], -100 where not learned."""
    rng = random.Random(0)
    while True:
        rng.shuffle(examples)
        for begin in range(0, len(examples), _POOL):
            groups: list[Encoded] = [[]]
            for example in sorted(examples[begin : begin + _POOL], key=lambda e: len(e[0])):
                if (len(groups[-1]) + 1) * len(example[0]) > budget:
                    groups.append([])
                groups[-1].append(example)
            rng.shuffle(groups)
            for group in groups:
                yield _pad(group, device)


def _pad(group: Encoded, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in group)
    tokens, labels = torch.zeros(len(group), width, dtype=torch.int64), torch.full((len(group), width), -100)
    for row, (ids, prompt) in enumerate(group):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt : len(ids)] = torch.tensor(ids[prompt:])
    return tokens.to(device), labels.to(device)


def _update(model: Any, optimizer: Any, ids: Tensor, labels: Tensor, rate: float) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(ids).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _save(folder: Path, model: Any, tokenizer: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers}

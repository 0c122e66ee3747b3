"""Outputs of transformers for the tiny models: the expected values of the actor's numerics tests."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_tlt.types import TrainSequence
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import once
from tests.mpi.workers.actor_common import (
    EXPERTS,
    KINDS,
    LORA,
    LORA_KINDS,
    MOE_KINDS,
    results,
    save_model,
    sequences,
    with_routed_experts,
)

TEMPERATURES = (1.0, 0.8)


def write_expected(root: Path, kind: str) -> None:
    """Saves the model of `kind` in root/kind; its weights, log-probs, loss, gradients in root/kind.pt."""
    model = save_model(kind, root / kind)
    every = sequences(18)
    tied = model.config.tie_word_embeddings
    weights = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    with torch.no_grad():
        logprobs = {t: [_token_stats(model, s, t)[0].numpy() for s in every] for t in TEMPERATURES}
        of_tokens = [(_token_stats(model, s, 0.8)[1], torch.from_numpy(s.loss_mask)) for s in every]
    entropy = float(sum(h @ mask for h, mask in of_tokens) / sum(mask.sum() for _, mask in of_tokens))
    loss = sum(_weighted_nll(model, s, 0.8) for s in every) / 250.0
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {"weights": weights, "logprobs": logprobs, "loss": loss.item(), "gradients": gradients, "entropy": entropy}
    if kind in LORA_KINDS:
        found["lora"] = write_adapter(root / kind, model, every)
    if kind == "qwen3_moe":
        model.zero_grad(set_to_none=True)
        routed_loss(model, with_routed_experts(every, model.config.num_hidden_layers)).backward()
        found["routed"] = {n: p.grad for n, p in model.named_parameters()}
    torch.save(found, root / f"{kind}.pt")


def write_adapter(directory: Path, model: Any, every: list[TrainSequence]) -> dict[str, Any]:
    """Random adapters of every linear layer as a PEFT directory, DIRECTORY-adapter, written by hand; and what
    transformers makes of the weights W + alpha / r B A: log-probs, loss, and the factors' gradients."""
    draw = torch.Generator().manual_seed(5)
    rank, scale = LORA["rank"], LORA["alpha"] / LORA["rank"]
    factors: dict[str, Tensor] = {}
    merged = dict(load_file(directory / "model.safetensors"))
    for name, weight in list(merged.items()):
        stem = name.removesuffix(".weight")
        if stem.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")):
            for which, shape in {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}.items():
                factor = 0.1 * torch.randn(shape, generator=draw)
                factors[f"{stem}.lora_{which}.weight"] = factor.requires_grad_()
            merged[name] = weight + scale * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"]
    out = directory.with_name(directory.name + "-adapter")
    out.mkdir()
    stored = {f"base_model.model.{name}": factor.detach() for name, factor in factors.items()}
    save_file(stored, out / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none", "target_modules": "all-linear"}
    (out / "adapter_config.json").write_text(json.dumps(said))

    parts = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}
    weights = _with_stacks(merged, parts)
    call = partial(torch.func.functional_call, model, {**dict(model.named_parameters()), **weights})
    as_model = lambda ids: call((ids,))  # noqa: E731
    loss = sum(_weighted_nll(as_model, s, 0.8) for s in every) / 250.0
    names = list(factors)
    gradients = dict(zip(names, torch.autograd.grad(loss, list(factors.values())), strict=True))
    leaves = [f"{m}_proj.lora_{which}.weight" for m in ("gate", "up", "down") for which in "AB"]
    with torch.no_grad():
        logprobs = {0.8: [_token_stats(as_model, s, 0.8)[0].numpy() for s in every]}
    return {
        "weights": {name: tensor.detach() for name, tensor in weights.items()},
        "logprobs": logprobs,
        "loss": loss.item(),
        "gradients": _with_stacks(gradients, {leaf: (leaf,) for leaf in leaves}),
    }


def _with_stacks(tensors: dict[str, Tensor], stacks: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """`tensors` with those of single experts, `...experts.E.PART`, as stacks `...experts.STACK` of their parts."""
    single = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
    found = {name: tensor for name, tensor in tensors.items() if not single.fullmatch(name)}
    for root in dict.fromkeys(match[1] for match in map(single.fullmatch, tensors) if match):
        for stack, parts in stacks.items():
            rows = [torch.cat([tensors[f"{root}.{e}.{part}"] for part in parts]) for e in range(EXPERTS)]
            found[f"{root}.{stack}"] = torch.stack(rows)
    return found


def routed_loss(model: Any, every: list[TrainSequence]) -> Tensor:
    """The loss with the sequences' experts forced, and the routers' losses by the book: 0.1 of load balancing (Switch
    Transformer), 0.01 of the z-loss, of all rows as one batch."""
    now: list[Tensor] = []
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.model.layers]

    def forced(place: int) -> Any:
        def gate(_module: Any, _args: Any, output: Any) -> Any:
            logits, _, own = output
            ids = torch.cat([now[0][:, place], own[-1:]])  # the last token is not fed in training
            ids = torch.where(ids >= 0, ids, own)
            seen[place].append((logits[:-1], ids[:-1]))
            return logits, logits.gather(1, ids).softmax(-1), ids

        return gate

    hooks = [layer.mlp.gate.register_forward_hook(forced(i)) for i, layer in enumerate(model.model.layers)]
    total = torch.zeros(())
    for sequence in every:
        now[:] = [torch.from_numpy(sequence.trajectory.routed_experts).long()]
        total = total + _weighted_nll(model, sequence, 0.8) / 250.0
    for layer in seen:
        logits, ids = (torch.cat(part) for part in zip(*layer, strict=True))
        share = torch.nn.functional.one_hot(ids.flatten(), logits.shape[1]).float().mean(0)
        balance = logits.shape[1] * (share * logits.softmax(-1).mean(0)).sum()
        total = total + 0.1 * balance + 0.01 * logits.logsumexp(-1).square().mean()
    for hook in hooks:
        hook.remove()
    return total


def _token_stats(model: Any, sequence: TrainSequence, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each response token, by the book."""
    tokens, start = torch.from_numpy(sequence.trajectory.token_ids).long(), sequence.trajectory.response_start
    logits = model(tokens[None]).logits[0].float() / temperature
    table = logits.log_softmax(-1)[start - 1 : -1]
    picked = table.gather(1, tokens[start:, None])[:, 0]
    return picked, -(table.exp() * table).sum(-1)


def _weighted_nll(model: Any, sequence: TrainSequence, temperature: float) -> Tensor:
    """The loss of `actor_common.WeightedNll`, written again; without the given tokens, whatever their mask."""
    logprobs, entropy = _token_stats(model, sequence, temperature)
    advantages, mask = (torch.from_numpy(np.array(a)) for a in (sequence.advantages, sequence.loss_mask))
    for begin, end in sequence.trajectory.given:
        mask[begin:end] = 0.0
    return (-(advantages * logprobs + 0.01 * entropy) * mask).sum() * sequence.weight


def _scratch() -> Path:
    root = Path(tempfile.mkdtemp(prefix="actor-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def models_root() -> Path:
    """A directory with the models of all kinds, made once a process."""
    root = _scratch()
    for kind in (*KINDS, *MOE_KINDS):
        save_model(kind, root / kind)
    return root


@functools.cache
def expected_root() -> Path:
    """A directory with the models and expected values of all kinds, made once a process."""
    root = _scratch()
    for kind in (*KINDS, *MOE_KINDS):
        write_expected(root, kind)
    return root


@once
def one_rank_results() -> list[dict[str, Any]]:
    """What the one-rank worker found. It also leaves the outcome that the parallel tests compare with."""
    done = run_ranks(1, "tests/mpi/workers/actor_parity.py", str(expected_root()))
    return results(done.stdout)

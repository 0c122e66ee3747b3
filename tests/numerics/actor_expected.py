"""Outputs of transformers for the tiny models: the expected values of the actor's numerics tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.types import TrainSequence
from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import KINDS, MOE_KINDS, results, save_model, sequences

TEMPERATURES = (1.0, 0.8)


def write_expected(root: Path, kind: str) -> None:
    """Saves the model of `kind` in root/kind; its weights, log-probs, loss, gradients in root/kind.pt."""
    model = save_model(kind, root / kind)
    every = sequences(18)
    tied = model.config.tie_word_embeddings
    weights = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    with torch.no_grad():
        logprobs = {t: [_token_stats(model, s, t)[0].numpy() for s in every] for t in TEMPERATURES}
    loss = sum(_weighted_nll(model, s, 0.8) for s in every) / 250.0
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.save(
        {"weights": weights, "logprobs": logprobs, "loss": loss.item(), "gradients": gradients},
        root / f"{kind}.pt",
    )


def _token_stats(model: Any, sequence: TrainSequence, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each response token, by the book."""
    logits = model(torch.from_numpy(sequence.token_ids)[None]).logits[0].float() / temperature
    table = logits.log_softmax(-1)[sequence.prompt_len - 1 : -1]
    picked = table.gather(1, torch.from_numpy(sequence.token_ids[sequence.prompt_len :])[:, None])[:, 0]
    return picked, -(table.exp() * table).sum(-1)


def _weighted_nll(model: Any, sequence: TrainSequence, temperature: float) -> Tensor:
    """The loss of `actor_common.WeightedNll`, written again."""
    logprobs, entropy = _token_stats(model, sequence, temperature)
    advantages, mask = (torch.from_numpy(np.asarray(a)) for a in (sequence.advantages, sequence.loss_mask))
    return (-(advantages * logprobs + 0.01 * entropy) * mask).sum() * sequence.weight


@functools.cache
def expected_root() -> Path:
    """A directory with the models and expected values of all kinds, made once a session."""
    root = Path(tempfile.mkdtemp(prefix="actor-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for kind in (*KINDS, *MOE_KINDS):
        write_expected(root, kind)
    return root


@functools.cache
def one_rank_results() -> list[dict[str, Any]]:
    """What the one-rank worker found. It also leaves the outcome that the parallel tests compare with."""
    done = run_ranks(1, "tests/mpi/workers/actor_parity.py", str(expected_root()))
    return results(done.stdout)

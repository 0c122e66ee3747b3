"""Values and gradients of our losses against TRL's own code, on random batches of one turn and of several.

docs/guides/algorithms.md says where they differ; here each has the settings with which they agree.

Legend: B responses, T tokens of the longest response.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from tests.helpers.mpi import ROOT
from tests.unit.algorithms.test_losses import Response, production_loss

MAX_TOKENS = 12
EXACT = {"importance_cap": 0.0}  # no correction of the engine's log-probs
TRL = EXACT | {"advantage_eps": 1e-4}
TIS = {"importance_cap": 2.0}


@dataclass(frozen=True)
class Batch:
    """A padded batch of responses, float64 where not said otherwise."""

    prompt: Tensor  # int64 [B]
    reward: Tensor  # [B]
    lengths: Tensor  # int64 [B], tokens of the response, drawn and given
    mask: Tensor  # [B, T], 1 where the policy drew
    logp: Tensor  # [B, T], with gradient
    old: Tensor  # [B, T]
    rollout: Tensor  # [B, T], the engine's
    ref: Tensor  # [B, T]


def trl_advantages(b: Batch, scale: bool) -> Tensor:
    """[B] of `_generate_and_score_completions` with `scale_rewards` "group", or "none"."""
    group = b.prompt[:, None] == b.prompt[None, :]  # bool [B, B]: which responses have one prompt
    mean = (group * b.reward).sum(1) / group.sum(1)
    squares = (group * (b.reward[None, :] - mean[:, None]) ** 2).sum(1)
    std = (squares / (group.sum(1) - 1)).sqrt()
    return (b.reward - mean) / (std + 1e-4) if scale else b.reward - mean


def random_batch(seed: int, multi_turn: bool, drift: float) -> Batch:
    """`drift`: of log-probs from the old policy's, at most three times as much."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat([3, 7, 8, 20], rng.integers(2, 5, 4))
    n, lengths = len(prompt), rng.integers(1, MAX_TOKENS + 1, len(prompt))
    mask = np.arange(MAX_TOKENS) < lengths[:, None]
    if multi_turn:
        mask &= (rng.random(mask.shape) < 0.6) | (np.arange(MAX_TOKENS) == 0)

    def near(center: np.ndarray, scale: float) -> np.ndarray:
        return center + scale * rng.standard_normal(center.shape).clip(-3, 3)

    old = -np.abs(rng.standard_normal((n, MAX_TOKENS)))
    columns = (near(old, drift), old, near(old, 0.5), near(old, 0.4))
    logp, old, rollout, ref = (torch.from_numpy(column) for column in columns)
    reward = rng.choice([0.0, 0.25, 1.0], n)
    reward[0], reward[-1] = 1.0 - reward[1], 1.0 - reward[-2]
    given = [torch.from_numpy(np.array(column)) for column in (prompt, reward, lengths, mask.astype(float))]
    return Batch(*given, logp.requires_grad_(), old, rollout, ref)


def ours(b: Batch, name: str, settings: dict[str, Any]) -> Tensor:
    """Through the production path: table, `assign`, packed micro-batches, divisor."""
    responses = []
    for i, length in enumerate(b.lengths.tolist()):
        columns = (column[i, :length] for column in (b.logp, b.old, b.rollout, b.ref))
        about = (int(b.prompt[i]), i, float(b.reward[i]), False)
        of = Response(*about, *columns, entropy=torch.zeros(length).double())
        of.given = tuple((t, t + 1) for t in range(length) if not b.mask[i, t])
        responses.append(of)
    algorithm = build_algorithm(AlgorithmSection(name=name, **settings), MAX_TOKENS)
    return production_loss(algorithm, responses, set(b.prompt.tolist()), garbage=False)


def assert_same(b: Batch, mine: Tensor, theirs: float, gradient: Tensor) -> None:
    assert float(mine.detach()) == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(torch.autograd.grad(mine, b.logp)[0], gradient, rtol=0, atol=1e-6)
    assert gradient.abs().max() > 1e-5


# Our algorithm and settings, TRL's `loss_type` and settings (tests/helpers/trl_losses.py).
OF_TRL: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("grpo", TRL, "grpo", {}),
    ("grpo", TRL | {"kl_coef": 0.1}, "grpo", {"beta": 0.1}),
    ("grpo", TRL | TIS, "grpo", {"cap": 2.0}),
    ("dapo", TRL, "dapo", {"epsilon_high": 0.28}),
    ("gspo", TRL, "grpo", {"level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    ("dr_grpo", EXACT, "dr_grpo", {"max_tokens": MAX_TOKENS}),
]


def python_with_trl() -> str:
    """This Python where it has TRL, else that of `make bench-trl`."""
    if importlib.util.find_spec("trl") is not None:
        return sys.executable
    python = ROOT / ".venv/peers-trl/bin/python"
    if not python.exists():
        pytest.skip("needs TRL: `make bench-trl`")
    return str(python)


@pytest.mark.nightly
def test_loss_and_gradient_are_those_of_trl_itself(tmp_path: Path) -> None:
    runs = [(*case, seed, turns) for case in OF_TRL for seed in range(5) for turns in (False, True)]
    batches, requests = [], []
    for name, _, loss_type, settings, seed, multi_turn in runs:
        b = random_batch(seed, multi_turn, drift=2e-3 if name == "gspo" else 0.3)
        batches.append(b)
        arrays = {field: value.detach() for field, value in vars(b).items()}
        requests.append({**arrays, "advantages": trl_advantages(b, loss_type != "dr_grpo"), "loss_type": loss_type})
        requests[-1] |= {"settings": settings}
    torch.save(requests, tmp_path / "in.pt")
    script = str(ROOT / "tests/helpers/trl_losses.py")
    subprocess.run([python_with_trl(), script, str(tmp_path / "in.pt"), str(tmp_path / "out.pt")], check=True)
    for (name, settings, *_), b, (loss, gradient) in zip(runs, batches, torch.load(tmp_path / "out.pt"), strict=True):
        assert_same(b, ours(b, name, settings), loss, gradient)

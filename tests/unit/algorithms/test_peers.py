"""Values and gradients of our losses against those of other projects, on random batches of one turn and of several.

docs/guides/algorithms.md says where they differ; here each has the settings with which they agree.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.algorithm import AlgorithmSection
from tests.helpers.mpi import ROOT
from tests.helpers.peer_losses import Batch, nemo, openrlhf, trl, trl_advantages, verl
from tests.unit.algorithms.test_losses import Response, production_loss

MAX_TOKENS = 12
DAPO, GSPO = (0.2, 0.28), (3e-4, 4e-4)
EXACT = {"importance_cap": 0.0}  # no correction of the engine's log-probs, which most peers have off by default
TRL, VERL, OPENRLHF = (EXACT | {"advantage_eps": eps} for eps in (1e-4, 1e-6, 1e-9))
TIS = {"importance_cap": 2.0}


def random_batch(seed: int, multi_turn: bool, drift: float = 0.3) -> Batch:
    """`drift`: of log-probs from the old policy's, at most three times as much: below verl's dual clip."""
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
    truncated = torch.from_numpy((rng.random(n) < 0.3) & (np.arange(n) > 0))
    return Batch(*given, truncated, logp.requires_grad_(), old, rollout, ref)


def ours(b: Batch, name: str, settings: dict[str, Any]) -> Tensor:
    """Through the production path: table, `assign`, packed micro-batches, divisor."""
    responses = []
    for i, length in enumerate(b.lengths.tolist()):
        columns = (column[i, :length] for column in (b.logp, b.old, b.rollout, b.ref))
        about = (int(b.prompt[i]), i, float(b.reward[i]), bool(b.truncated[i]))
        of = Response(*about, *columns, entropy=torch.zeros(length).double())
        of.kl = ((b.old - b.ref) * b.mask)[i, :length].tolist()
        of.given = tuple((t, t + 1) for t in range(length) if not b.mask[i, t])
        responses.append(of)
    algorithm = build_algorithm(AlgorithmSection(name=name, **settings), MAX_TOKENS)
    return production_loss(algorithm, responses, set(b.prompt.tolist()), garbage=False)


VERL_GRPO = partial(verl, estimator="grpo", aggregation="seq-mean-token-mean")
NEMO_GRPO = partial(nemo, estimator="grpo", token_level=False)
BY_SEQUENCE = {"sequence_ratio": True, "clip": GSPO}
# (ours, peer, our settings, the peer's loss)
CASES: list[tuple[str, str, dict[str, Any], Callable[[Batch], Tensor]]] = [
    ("grpo", "trl", TRL, partial(trl, loss_type="grpo")),
    ("grpo", "trl-kl", TRL | {"kl_coef": 0.1}, partial(trl, loss_type="grpo", beta=0.1)),
    ("grpo", "trl-vllm", TRL | TIS, partial(trl, loss_type="grpo", cap=2.0)),
    ("grpo", "verl", VERL, VERL_GRPO),
    ("grpo", "verl-kl", VERL | {"kl_coef": 0.1}, partial(VERL_GRPO, kl_coef=0.1)),
    ("grpo", "nemo", VERL, NEMO_GRPO),
    ("grpo", "nemo-truncated", VERL | {"mask_truncated": True}, partial(NEMO_GRPO, drop_truncated=True)),
    ("grpo", "openrlhf", OPENRLHF, partial(openrlhf, estimator="group_norm", token_level=False)),
    ("dapo", "trl", TRL, partial(trl, loss_type="dapo", clip=DAPO)),
    ("dapo", "verl", VERL, partial(verl, estimator="grpo", aggregation="token-mean", clip=DAPO)),
    ("dapo", "nemo", VERL, partial(nemo, estimator="grpo", token_level=True, clip=DAPO)),
    (
        "dapo",
        "nemo-tis-truncated",
        VERL | TIS | {"mask_truncated": True},
        partial(nemo, estimator="grpo", token_level=True, clip=DAPO, cap=2.0, drop_truncated=True),
    ),
    ("dapo", "openrlhf", OPENRLHF, partial(openrlhf, estimator="group_norm", token_level=True, clip=DAPO)),
    ("gspo", "trl", TRL, partial(trl, loss_type="grpo", level="sequence", clip=GSPO)),
    ("gspo", "verl", VERL, partial(VERL_GRPO, **BY_SEQUENCE)),
    ("gspo", "nemo", VERL, partial(NEMO_GRPO, **BY_SEQUENCE)),
    ("gspo", "openrlhf", OPENRLHF, partial(openrlhf, estimator="group_norm", token_level=False, **BY_SEQUENCE)),
    ("dr_grpo", "trl", EXACT, partial(trl, loss_type="dr_grpo", max_tokens=MAX_TOKENS)),
    (
        "dr_grpo",
        "verl",
        EXACT,
        partial(verl, estimator="dr_grpo", aggregation="seq-mean-token-sum-norm", max_tokens=MAX_TOKENS),
    ),
    ("rloo", "verl", EXACT, partial(verl, estimator="rloo", aggregation="seq-mean-token-sum")),
    ("reinforce_pp", "nemo", OPENRLHF, partial(nemo, estimator="reinforce_plus_plus", token_level=True)),
    ("reinforce_pp", "openrlhf", OPENRLHF, partial(openrlhf, estimator="reinforce", token_level=True)),
    (
        "reinforce_pp",
        "openrlhf-kl",
        OPENRLHF | {"kl_coef": 0.1, "kl_in": "reward"},
        partial(openrlhf, estimator="reinforce", token_level=True, kl_coef=0.1),
    ),
]


def assert_same(b: Batch, mine: Tensor, theirs: float, gradient: Tensor) -> None:
    assert float(mine.detach()) == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(torch.autograd.grad(mine, b.logp)[0], gradient, rtol=0, atol=1e-6)
    assert gradient.abs().max() > 1e-5


@pytest.mark.parametrize("multi_turn", [False, True], ids=["one-turn", "multi-turn"])
@pytest.mark.parametrize(("name", "peer", "settings", "loss"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_loss_and_gradient_are_the_peers(
    name: str, peer: str, settings: dict[str, Any], loss: Callable[[Batch], Tensor], multi_turn: bool
) -> None:
    for seed in range(5):
        b = random_batch(seed, multi_turn, drift=2e-3 if name == "gspo" else 0.3)
        theirs = loss(b)
        assert_same(b, ours(b, name, settings), float(theirs.detach()), torch.autograd.grad(theirs, b.logp)[0])


# Of TRL's own code: our algorithm and settings, TRL's `loss_type` and settings (tests/helpers/trl_losses.py).
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

"""Counting updates that are not finite, and what is kept of their batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.dims import Dims
from megatron_tlt.errors import TrainingError
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.types import TrainBatch, TrainOutput, TrainSequence, Trajectory

NAN = float("nan")


def sequence(prompt: int, index: int, response: int) -> TrainSequence:
    rng = np.random.default_rng((prompt, index))
    logprobs, *floats = (rng.random(response).astype(np.float32) for _ in range(3))
    tokens = rng.integers(0, 99, 2 + response).astype(np.int32)
    return TrainSequence(Trajectory(prompt, index, tokens, logprobs), *floats, weight=0.5)


BATCH = TrainBatch([[sequence(0, 0, 3), sequence(0, 1, 1)], [], [sequence(1, 0, 4)]], [2.0, 0.0, 1.0], 0.7, {"a": 1.0})


def watch(run_dir: Path, limit: int, rank: int = 0, dims: Dims | None = None) -> NonFiniteGuard:
    world: Any = SimpleNamespace(rank=rank, is_main=rank == 0)
    return NonFiniteGuard(limit, run_dir, world, dims or Dims())


def out(norm: float) -> TrainOutput:
    return TrainOutput(4, {"grad_norm": norm, "loss": norm}, skipped=not np.isfinite(norm))


def steps(guard: NonFiniteGuard, *norms: float) -> list[int]:
    return [int(guard.look(i, BATCH, out(n))["policy/nonfinite_in_a_row"]) for i, n in enumerate(norms, 1)]


def test_only_steps_in_a_row_count(tmp_path: Path) -> None:
    guard = watch(tmp_path, 3)
    assert steps(guard, NAN, float("inf"), 1.0, NAN, -float("inf")) == [1, 2, 0, 1, 2]
    guard.check()
    guard.look(6, BATCH, out(NAN))
    with pytest.raises(TrainingError, match=r"3 steps in a row .*max_lost_steps = 3.*nonfinite"):
        guard.check()


def test_a_step_without_an_update_is_none_of_them(tmp_path: Path) -> None:
    guard = watch(tmp_path, 1)
    guard.look(1, BATCH, TrainOutput(4, {"empty_step": 1.0}, skipped=True))
    guard.check()
    assert not (tmp_path / "nonfinite").exists()


def test_the_batch_can_be_put_together_again(tmp_path: Path) -> None:
    steps(watch(tmp_path, 2), NAN, NAN, NAN)
    kept = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert kept == ["step-000002", "step-000003"]
    arrays = np.load(tmp_path / "nonfinite/step-000003/rank-00000.npz", allow_pickle=False)
    assert arrays["denominators"].tolist() == BATCH.denominators
    responses = arrays["response_lens"]
    parts: list[list[TrainSequence]] = [[], [], []]
    for i, mini_batch in enumerate(arrays["mini_batch"]):
        token_at, at = arrays["lengths"][:i].sum(), responses[:i].sum()
        here = slice(at, at + responses[i])
        parts[mini_batch].append(
            TrainSequence(
                Trajectory(
                    int(arrays["prompt_ids"][i]),
                    int(arrays["sample_indices"][i]),
                    arrays["tokens"][token_at : token_at + arrays["lengths"][i]],
                    arrays["rollout_logprobs"][here],
                ),
                arrays["advantages"][here],
                arrays["loss_mask"][here],
                weight=float(arrays["weights"][i]),
            )
        )
    assert repr(parts) == repr(BATCH.mini_batches)


def test_one_rank_of_a_replica_writes(tmp_path: Path) -> None:
    dims = Dims(tp=2, dp=2)
    for rank in (1, 2, 3, 0):
        watch(tmp_path, 1, rank, dims).look(1, BATCH, out(NAN))
    written = sorted(path.name for path in (tmp_path / "nonfinite/step-000001").iterdir())
    assert written == ["rank-00000.npz", "rank-00002.npz"]


def test_a_disk_that_takes_nothing_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nonfinite").write_text("")
    with caplog.at_level("WARNING"):
        assert steps(watch(tmp_path, 3), NAN) == [1]
    assert "cannot be kept" in caplog.text

"""Updates that are not finite: the policy skips them, `NonFiniteGuard` counts them, writes their batches, ends the run.

    run_dir/nonfinite/step-000012/rank-00000.npz     the sequences of one data parallel replica, as arrays

`numpy.load` reads the arrays without unpickling: sequence i of mini-batch `mini_batch[i]` has `lengths[i]` tokens, of
which the last `response_lens[i]` are its response's; `tokens` holds all of them in a row, the other arrays those of the
responses; `rollout_logprobs` is NaN from an engine that has none; `denominators` divide the mini-batches' losses. The
step's metrics are in metrics.jsonl.
"""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.errors import TrainingError

if TYPE_CHECKING:
    from megatron_tlt.config.dims import Dims
    from megatron_tlt.distributed.world import World
    from megatron_tlt.types import TrainBatch, TrainOutput

_log = logging.getLogger(__name__)


class NonFiniteGuard:
    """Counts steps in a row with an update that was skipped because its gradient norm is not finite.

    The norm is the same on every rank, so all ranks count alike.
    """

    def __init__(self, limit: int, run_dir: Path, world: World, dims: Dims, setting: str = "train.max_lost_steps"):
        """`limit`: so many skipped steps in a row end the run; 0: no number does. `setting`: where it is set."""
        self._limit, self._directory, self._world = limit, run_dir / "nonfinite", world
        self._setting = setting
        first_ranks = [dims.replica_ranks(dp)[0] for dp in range(dims.dp)]
        self._writes = world.rank in first_ranks  # the other ranks of a replica hold the same sequences
        self._count = 0

    def unsaved(self) -> str | None:
        """Why the present state is not saved: weights that may be broken must not push good ones out."""
        return "not saved, for updates were not finite; the next start goes on before them" if self._count else None

    def look(self, step: int, batch: TrainBatch, out: TrainOutput) -> dict[str, float]:
        """After the update of `step`: counts a skipped one and writes its batch. Returns metrics.

        Only the batches of the last `limit` skipped steps stay. A disk that cannot take one costs a warning.
        """
        if "grad_norm" not in out.metrics:
            pass  # no update was tried: the count stays
        elif math.isfinite(out.metrics["grad_norm"]):
            self._count = 0
        else:
            self._count += 1
            try:
                self._keep(step, batch)
            except OSError as error:
                _log.warning("the batch of step %d cannot be kept: %s", step, error)
        return {"policy/nonfinite_in_a_row": float(self._count)}

    def check(self) -> None:
        """Raises TrainingError on every rank after `limit` such steps in a row."""
        if self._limit and self._count >= self._limit:
            raise TrainingError(
                f"updates of {self._count} steps in a row were not finite ({self._setting} = {self._limit}) "
                f"and skipped; no checkpoint was written since. Their batches are in {self._directory}"
            )

    def _keep(self, step: int, batch: TrainBatch) -> None:
        directory = self._directory / f"step-{step:06d}"
        if self._writes:
            for folder in (self._directory, directory):  # `parents` would not be private
                folder.mkdir(mode=0o700, exist_ok=True)
            np.savez(directory / f"rank-{self._world.rank:05d}.npz", allow_pickle=False, **as_arrays(batch))
        if not self._world.is_main:
            return
        kept = sorted(self._directory.glob("step-*"))
        later = [old for old in kept if old.name > directory.name]  # of a run that went on from before them
        for old in later + kept[: len(kept) - len(later)][: -max(1, self._limit)]:
            shutil.rmtree(old, ignore_errors=True)


def as_arrays(batch: TrainBatch) -> dict[str, np.ndarray]:
    """A batch as flat arrays; see the top of the file."""
    pairs = [(i, sequence) for i, part in enumerate(batch.mini_batches) for sequence in part]
    sequences = [sequence for _, sequence in pairs]
    trajectories = [sequence.trajectory for sequence in sequences]

    def joined(arrays: list[np.ndarray], kind: type[np.generic]) -> np.ndarray:
        return np.concatenate(arrays) if arrays else np.zeros(0, kind)

    return {
        "denominators": np.array(batch.denominators, np.float64),
        "mini_batch": np.array([i for i, _ in pairs], np.int64),
        "prompt_ids": np.array([t.prompt_id for t in trajectories], np.int64),
        "sample_indices": np.array([t.sample_index for t in trajectories], np.int64),
        "response_lens": np.array([len(t.logprobs) for t in trajectories], np.int64),
        "lengths": np.array([t.length for t in trajectories], np.int64),
        "weights": np.array([s.weight for s in sequences], np.float64),
        "tokens": joined([t.token_ids for t in trajectories], np.int32),
        "advantages": joined([s.advantages for s in sequences], np.float32),
        "loss_mask": joined([s.loss_mask for s in sequences], np.float32),
        "rollout_logprobs": joined([t.logprobs for t in trajectories], np.float32),
    }

"""The drafter during RL: the hidden states for its training, and when the ranks' drafters are merged and published.

    rank 0   rollout ================================== | score .. update | merge | sync policy and drafter
    rank 1   rollout ============ | train train train . | score .. update | merge | sync policy and drafter
                     hidden states of finished responses --^     |
                          or, to the next step's windows, <----- of the responses that it passes (actor.hidden_states)

No call here can change a response (docs/design/numerics.md): the drafter only proposes, and the policy's
gradients, weights and rewards do not depend on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_tlt.drafter.sharing import HiddenStateSharing
from megatron_tlt.observe.reduction import RankMetrics, sums

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
    from megatron_tlt.interfaces import RolloutBackend

_log = logging.getLogger(__name__)


class OnlineDrafterController:
    """One rank's drafter in a run. Without a trainer (`idle.train_drafter` off) it only passes a checkpoint's on."""

    def __init__(
        self,
        world: World,
        backend: RolloutBackend,
        trainer: OnlineDrafterTrainer | None = None,
        sharing: HiddenStateSharing | None = None,
        has_drafter: bool = True,
    ):
        """`backend` drafts with the weights of `trainer`. `has_drafter`: its engine has a trained drafter."""
        self.trainer = trainer
        self.disabled_reason: str | None = None
        self._world, self._backend = world, backend
        self._sharing, self._has_drafter = sharing or HiddenStateSharing(), has_drafter
        self._checkpointed: Mapping[str, Any] | None = None  # a drafter that this run does not train
        # Version of the drafter in the engines; None: they have another one than this rank.
        self._published: int | None = 0 if trainer is None else trainer.version

    @property
    def _active_trainer(self) -> OnlineDrafterTrainer | None:
        """The trainer, while it trains: a failure on any rank ends training on all of them."""
        trainer = self.trainer
        is_active = trainer is not None and trainer.enabled and self.disabled_reason is None
        return trainer if is_active else None

    # -- a step, in this order ------------------------------------------------------------------------------

    def begin_step(self, policy_version: int) -> None:
        """Rollouts by `policy_version` begin: drops hidden states that are too old to train on."""
        if self.trainer is not None:
            self.trainer.begin_step(policy_version, self._backend.lookup_tables)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around a `generate`: hidden states of finished responses go to the training buffer, unless the actor's do."""
        trainer = self._active_trainer
        if trainer is None or trainer.from_actor:
            yield
            return
        self._backend.collect_hidden_states(trainer.buffer.add)
        try:
            yield
        finally:
            self._backend.collect_hidden_states(None)

    def num_samples(self) -> int:
        """Sequences in the training buffer."""
        return 0 if self.trainer is None else len(self.trainer.buffer)

    def train_step(self) -> Mapping[str, float] | None:
        """One micro-step: its metrics; None if there is nothing to train on. Collective among the ranks of a replica.

        Raises DrafterError if training failed.
        """
        return None if self.trainer is None else self.trainer.train_step()

    def merge(self, at_once: bool = True) -> dict[str, float]:
        """Merges the drafters of all replicas, without `at_once` only where that is worth its time; with a merge that
        changes the drafter replicas exchange hidden states. Collective. Returns metrics.
        """
        trainer, world = self.trainer, self._world
        if trainer is None:
            return {}
        version = trainer.version
        report = trainer.merge(_all_reduce, world.rank, world.size, at_once)
        if (report.rolled_back or report.disabled) and self.disabled_reason is None:
            self.disabled_reason = str(trainer.failure or f"training failed on ranks {report.disabled}")
            if report.rolled_back and world.rank == 0:  # a rank's own failure has been logged by that rank
                _log.warning("drafter training is off for the rest of the run: %s", self.disabled_reason)
        if self._active_trainer is not None and trainer.version != version:
            started = time.perf_counter()
            self._sharing.exchange(world, trainer.buffer, trainer.version)
            trainer.merge_seconds += time.perf_counter() - started
        return {
            "drafter/version": float(trainer.version),
            "drafter/coverage": report.coverage,
            "drafter/disabled": float(world.size if report.rolled_back else len(report.disabled)),
        }

    def unpublished(self) -> tuple[Mapping[str, Tensor], int] | None:
        """Tensors and version of the drafter that the engines do not have yet; None: they have it, or use none."""
        if self.trainer is not None:
            is_new = self.trainer.version != self._published
            return (self.trainer.weights(), self.trainer.version) if is_new else None
        if self._checkpointed is None or not self._has_drafter or self._published is not None:
            return None
        return self._checkpointed["model"], int(self._checkpointed["version"])

    def mark_published(self, version: int) -> None:
        """The engines have the drafter of `version`."""
        self._published = version

    def buffer_metrics(self) -> RankMetrics:
        """Counters of this rank's training buffer."""
        metrics = {} if self.trainer is None else self.trainer.buffer.metrics()
        return sums({f"drafter/buffer/{name}": value for name, value in metrics.items()})

    def drop_window(self) -> None:
        """Undoes the training since the last merge: the step is dropped. Called on every rank."""
        if self.trainer is not None:
            self.trainer.drop_window()

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any] | None:
        """Weights, moments and versions of the drafter in training; without one, those with which the run was resumed.

        Collective: a merge that was put off is made first (after a signal; other checkpoints follow a merge). The first
        rank of the first replica gets the tensors; None on the other replicas.
        """
        if self.trainer is not None:
            self.trainer.merge(_all_reduce, self._world.rank, self._world.size)
        if self._sharing.replica:
            return None
        return self._checkpointed if self.trainer is None else self.trainer.state_dict()

    def load_state_dict(self, drafter: Mapping[str, Any] | None) -> None:
        """Loads what `state_dict` returned; None: the checkpoint has no drafter.

        Raises CheckpointError for the drafter of another policy.
        """
        if drafter is None:
            return
        self._published = None
        if self.trainer is not None:
            self.trainer.load_state_dict(drafter)
        else:  # served, and kept in this run's checkpoints for a run that trains it again
            self._checkpointed = drafter


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)

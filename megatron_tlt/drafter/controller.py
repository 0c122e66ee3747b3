"""The drafter during RL: trained while this rank waits, merged when all ranks meet, served together with the policy.

    rank 0   rollout ================================== | score .. update | merge | push policy and drafter
    rank 1   rollout ============ | train train train . | score .. update | merge | push policy and drafter
                     hidden states of finished answers --^

Nothing here can change an answer (docs/numerics.md): the drafter only proposes, and the policy's gradients, weights and
rewards never see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from megatron_tlt.drafter.sharing import HiddenStateSharing
from megatron_tlt.idle.policy import tokens_left
from megatron_tlt.idle.window import IdleWindow, WindowReport
from megatron_tlt.interfaces import ProgressCallback
from megatron_tlt.models.config import EMBED, HEAD
from megatron_tlt.observe.gpu import GpuMonitor

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
    from megatron_tlt.idle.messages import RequestRange
    from megatron_tlt.interfaces import Policy, RolloutBackend, WeightSync
    from megatron_tlt.types import Sample

Watch = Callable[[Iterable[tuple[str, "Tensor"]]], Iterable[tuple[str, "Tensor"]]]  # passes a stream on

_KEPT_LENGTHS = 256
_FIRST_GUESS = 256.0  # tokens of an answer, until lengths have been seen


@dataclass(frozen=True, slots=True)
class Options:
    """What upkeep needs to know beside its parts."""

    speaks: bool = True
    """Whether this rank's figures count: ranks of one replica train as one, so its first rank's do."""
    has_eagle: bool = True
    """Whether the engines draft with a trained drafter."""
    gpu: GpuMonitor = field(default_factory=lambda: GpuMonitor(None))
    """Only reports."""
    sharing: HiddenStateSharing = field(default_factory=HiddenStateSharing)
    """Of answers to train on, between replicas."""
    queued: Callable[[], int] = lambda: 0
    """Requests of this replica that another could take over."""


class OnlineDrafterController:
    """One rank's part. Without a trainer (`idle.train_drafter` off) ranks wait, and tell each other how long."""

    def __init__(
        self,
        world: World,
        backend: RolloutBackend,
        sync: WeightSync,
        window: IdleWindow,
        trainer: OnlineDrafterTrainer | None = None,
        options: Options | None = None,
    ):
        """`backend` drafts with the weights of `trainer`."""
        self.trainer = trainer
        self._options = options or Options()
        self._kept: Mapping[str, Any] | None = None  # a checkpoint's drafter that this run does not train
        self._world, self._backend, self._sync, self._window = world, backend, sync, window
        self._lengths = np.array([_FIRST_GUESS])  # of the last rollout's answers, ascending
        self._figures: dict[str, float] = {}
        # Merges behind the drafter that the engines have; None: they have another one than this rank.
        self._published: int | None = 0 if trainer is None else trainer.version

    @property
    def _active(self) -> OnlineDrafterTrainer | None:
        """The trainer, as long as it trains: a failure on any rank ends training on all of them."""
        trainer = self.trainer
        ended = trainer is None or not trainer.enabled or self._window.disabled_reason is not None
        return None if ended else trainer

    # -- a step, in this order ------------------------------------------------------------------------------

    def begin_step(self, policy_version: int) -> None:
        """A step's rollouts by `policy_version` begin: what is too old to train on is dropped."""
        self._figures = {}
        if self.trainer is not None:
            self.trainer.begin_step(policy_version)

    @contextmanager
    def rollout(self, on_progress: ProgressCallback | None = None) -> Iterator[ProgressCallback]:
        """Around one `generate`: hidden states of finished answers are kept, and others are told how far it is.

        Yields the callback for `generate`, which calls `on_progress`, too.
        """
        self._window.begin()
        with self.helping(on_progress) as progress:
            yield progress

    def take_over(self) -> Sequence[RequestRange]:
        """This replica is dry: requests of busy ones, to be answered within `helping`; none when nobody has a queue any
        more.
        """
        return self._window.take_over()

    @contextmanager
    def helping(self, on_progress: ProgressCallback | None = None) -> Iterator[ProgressCallback]:
        """Around the `generate` that answers what `take_over` returned; as `rollout`."""
        started = time.perf_counter()

        def progress(running: int, waiting: int, generated_tokens: int) -> None:
            speed = generated_tokens / max(1e-6, time.perf_counter() - started)
            lengths = self._backend.running_lengths()
            left = tokens_left(lengths, waiting, self._lengths)
            self._world.pulse(
                state="BUSY", running=running, queued=waiting, longest=int(lengths.max(initial=0)), left=left
            )
            self._window.coordinator.progress(running, left, speed, self._options.queued())
            if on_progress is not None:
                on_progress(running, waiting, generated_tokens)

        trainer = self._active
        if trainer is not None:
            self._backend.collect_hidden_states(trainer.buffer.add)
        try:
            yield progress
        finally:
            if trainer is not None:
                self._backend.collect_hidden_states(None)

    def wait(self, samples: list[Sample]) -> WindowReport:
        """This replica is dry: trains, or sleeps, until every replica is. Collective; nobody waits inside MPI."""
        if samples:
            self._lengths = np.sort(np.array([len(s.token_ids) for s in samples], np.float64))
        trainer = self.trainer
        self._options.gpu.start()
        report = self._window.run(trainer.train_step if trainer is not None else _nothing)
        self._add(_named(self._options.gpu.stop()))
        self._add({"idle/seconds": report.idle_seconds, "idle/recovered_seconds": report.training_seconds})
        if self._options.speaks:
            self._add({"drafter/steps": float(report.steps), "drafter/tokens": float(report.tokens)})
        if report.steps:
            learned = {name: report.metrics[name] for name in ("loss", "accept/1") if name in report.metrics}
            self._figures |= {f"drafter/{name}_mean": value for name, value in learned.items()}
        if report.stop_seconds is not None:
            self._add({"idle/stop_ms_max": 1e3 * max(0.0, report.stop_seconds)})
        return report

    def merge(self) -> dict[str, float]:
        """One drafter of all replicas' again, and answers for all of them to train on. Collective. Returns metrics."""
        trainer = self.trainer
        if trainer is None:
            return {}
        started = time.perf_counter()
        report = trainer.merge(_all_reduce, self._world.rank, self._world.size)
        if report.rolled_back and self._world.rank == 0:
            self._window.disable(str(trainer.failure))
        elif (report.disabled or report.rolled_back) and self._window.disabled_reason is None:
            failed = ", ".join(map(str, report.disabled)) or "every rank"
            self._window.disabled_reason = f"it failed on rank {failed}"  # which has said so itself
        if self._active is not None:
            self._options.sharing.exchange(self._world, trainer.buffer, trainer.version)
        self._add({f"drafter/buffer/{name}": value for name, value in trainer.buffer.metrics().items()})
        metrics = {"drafter/version": float(trainer.version)}
        metrics["drafter/trained_tokens"] = float(trainer.trained_tokens)
        metrics["drafter/disabled"] = float(self._world.size if report.rolled_back else len(report.disabled))
        metrics["drafter/merge_seconds"] = time.perf_counter() - started
        return metrics

    def push(self, policy: Policy, watch: Watch = iter) -> dict[str, float]:
        """Policy and, if the engines have another, drafter into every engine: both or none. Collective.

        The policy's tensors go through `watch`. Raises SyncError.
        """
        drafter = self._unpublished()
        version = policy.policy_version
        metrics = self._sync.push(self._watch(watch(policy.named_weights()), version), version, drafter)
        if drafter is not None:
            self._published = drafter[1]
        return metrics

    def _unpublished(self) -> tuple[Mapping[str, Tensor], int] | None:
        """Tensors and version of the drafter, if the engines want one and have another."""
        if self.trainer is not None:
            new = self.trainer.version != self._published
            return (self.trainer.weights(), self.trainer.version) if new else None
        if self._kept is None or not self._options.has_eagle or self._published is not None:
            return None
        return self._kept["model"], int(self._kept["version"])

    def _watch(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Passes the policy's stream on; the trainer keeps the embedding and the LM head that go with `version`."""
        kept: dict[str, Tensor] = {}
        for name, tensor in weights:
            if self._active is not None and name in (EMBED, HEAD):
                kept[name] = tensor.detach().clone()  # a stream's tensors may be gone with the next one
            yield name, tensor
        if kept and self.trainer is not None:
            self.trainer.set_tables(version, kept[EMBED], kept.get(HEAD, kept[EMBED]))

    def take_figures(self) -> dict[str, float]:
        """This rank's figures of the step; names as in `Observer.log_step`."""
        figures, self._figures = self._figures, {}
        return figures

    def _add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            old = self._figures.get(name, 0.0)
            self._figures[name] = max(old, value) if name.endswith("_max") else old + value

    def drop_window(self) -> None:
        """The step is dropped, and what was trained in its idle time with it. Called on every rank."""
        if self.trainer is not None:
            self.trainer.drop_window()

    def drafter_state(self) -> Mapping[str, Any] | None:
        """Weights, moments and counters of the drafter in training; without one, what the run was resumed with."""
        return self._kept if self.trainer is None else self.trainer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the drafter itself."""
        every = -(-len(self._lengths) // _KEPT_LENGTHS)
        return {"lengths": self._lengths[::every].tolist()}

    def load_state_dict(self, state: Mapping[str, Any], drafter: Mapping[str, Any] | None) -> None:
        """Takes `state_dict`'s and `drafter_state`'s. Raises CheckpointError for the drafter of another policy."""
        self._lengths = np.array(state.get("lengths") or [_FIRST_GUESS])
        if drafter is None:
            return
        self._published = None
        if self.trainer is not None:
            self.trainer.load_state_dict(drafter)
        else:  # drafted with, and kept in this run's checkpoints, for a run that trains it again
            self._kept = drafter

    def close(self) -> None:
        """Frees the coordinator's communicator. Collective."""
        close = getattr(self._window.coordinator, "close", None)
        if close is not None:
            close()


def _named(gpu: Mapping[str, float]) -> dict[str, float]:
    """Of a window's GPU metrics what adds up over ranks: energy; of the others the highest is reported."""
    return {name if name == "gpu/energy_j" else f"{name}_max": value for name, value in gpu.items()}


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _nothing() -> None:
    return None

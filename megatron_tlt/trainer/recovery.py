"""Recovery of an RL run: the state that checkpoints hold, cached responses, signals, the limit of skipped updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import CheckpointError
from megatron_tlt.trainer.evaluation import EvalResult

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.drafters.training.run_drafter import RunDrafter
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.observe.reduction import RankMetrics
    from megatron_tlt.resilience.nonfinite import NonFiniteGuard
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.trainer.carry_over import CarriedGroups
    from megatron_tlt.types import GenerateCall, Sample, TrainBatch, TrainOutput


@dataclass
class TrainState:
    """How far a run is. A checkpoint holds it beside policy, optimizer and schedule."""

    step: int = 0  # steps done
    empty_steps: int = 0  # the last ones in a row in which no response was trained on, see `EmptySteps`
    evaluations: list[EvalResult] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Recovery:
    """One rank's part. Checkpoints save and restore `state` and the parts from `prompts` to `drafter`."""

    state: TrainState
    prompts: PromptStream
    carried: CarriedGroups
    backend: RolloutBackend
    drafter: RunDrafter
    checkpoints: CheckpointManager
    rollout_cache: RolloutCache
    nonfinite: NonFiniteGuard
    shutdown: GracefulShutdown
    _before: dict[str, Any] | None = None  # the state before the step under way

    def load(self, loaded: Mapping[str, Any] | None) -> None:
        """Goes on from the state that a checkpoint holds; None: from the beginning. Mutates `state` and the parts.
        Collective. Raises CheckpointError for a state that lacks an entry.
        """
        if loaded is not None:
            try:
                self._load(loaded)
            except KeyError as error:
                raise CheckpointError(f"the checkpoint's state has no {error}: another version wrote it") from error
        self.rollout_cache.start(self.state.step)

    def _load(self, loaded: Mapping[str, Any]) -> None:
        self.prompts.load_state_dict(loaded["prompts"])
        self.carried.load(loaded["carried"], loaded["carried_from"])
        self.backend.load_state_dict(loaded["engine"])
        self.drafter.load_state_dict(loaded["drafter"])
        self.state.step = loaded["step"]
        self.state.empty_steps = loaded["empty_steps"]
        self.state.evaluations = [EvalResult(**e) for e in loaded["evaluations"]]

    def begin_step(self) -> None:
        """Before a step: records the state that a checkpoint gets if a signal drops the step."""
        self._before = self._snapshot()
        self.rollout_cache.begin_step(self.state.step + 1, self.backend.policy_version)

    def generate(self, call: GenerateCall) -> tuple[list[Sample], bool]:
        """Samples of the backend, some from the rollout cache; ([], True) if a signal cut the rollout short."""
        return self.shutdown.interruptible(self.rollout_cache.generate, call)

    def end_rollouts(self) -> RankMetrics:
        """After the step's last response; returns metrics of the rollout cache."""
        return self.rollout_cache.end_step()

    def may_stop(self, place: str, interrupted: bool = False) -> None:
        """Between two phases of a step. Collective. Raises GracefulExit; see `GracefulShutdown.sync`."""
        self.shutdown.sync(place, interrupted)

    def unwatched(self, what: str) -> AbstractContextManager[None]:
        """A part of a step in which no signal is looked at; see `GracefulShutdown.unwatched`."""
        return self.shutdown.unwatched(what)

    def look_at(self, batch: TrainBatch, out: TrainOutput) -> dict[str, float]:
        """After the update of the step under way: counts and records one that is not finite. Returns metrics."""
        return self.nonfinite.look(self.state.step + 1, batch, out)

    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is to be saved after the step under way."""
        return self.checkpoints.is_scheduled(self.state.step + 1)

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The same `weights` of the policy, which the rollout cache's fingerprint reads on their way to the engines."""
        return self.rollout_cache.fingerprint(weights)

    def step_done(self) -> None:
        """After the step's last change to policy and drafter: no signal drops it any more."""
        self.state.step += 1
        self._before = None
        self.shutdown.step_done()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last finished step. Mutates the drafter where a step is unfinished: its training in this
        step is dropped. Collective.
        """
        if self._before is not None:
            self.drafter.drop_window()
        return {**(self._before or self._snapshot()), "drafter": self.drafter.state_dict()}

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.state.step,
            "empty_steps": self.state.empty_steps,
            "prompts": self.prompts.state_dict(),
            "carried": self.carried.groups,
            "carried_from": self.carried.oldest_position,
            "evaluations": [asdict(e) for e in self.state.evaluations],
            "engine": self.backend.state_dict(),
        }

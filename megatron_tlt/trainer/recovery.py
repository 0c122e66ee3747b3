"""Recovery of a run: checkpoints, cached responses, the orderly end after a signal, the limit of skipped updates.

    resume -> [ begin_step ... save_if_due -> end_step ] ... -> finish
                    a signal: save_and_leave, with the state of before the unfinished step
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.data.hub import with_names
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.runfiles import CONFIG_FILE
from megatron_tlt.trainer.evaluation import EvalResult

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.training.run_drafter import RunDrafter
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.observe.reduction import RankMetrics
    from megatron_tlt.resilience.nonfinite import NonFiniteGuard
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown
    from megatron_tlt.trainer.carry_over import CarriedGroups
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.types import GenerateCall, Sample, TrainBatch, TrainOutput


@dataclass
class TrainState:
    """How far a run is. A checkpoint holds it beside policy, optimizer and schedule."""

    step: int = 0  # steps done
    evaluations: list[EvalResult] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Recovery:
    """One rank's part. Checkpoints save and restore `state` and the parts from `prompts` to `drafter`."""

    config: Config
    world: World
    state: TrainState
    prompts: PromptStream
    carried: CarriedGroups
    backend: RolloutBackend
    policy: MegatronPolicy
    drafter: RunDrafter
    checkpoints: CheckpointManager
    rollout_cache: RolloutCache
    nonfinite: NonFiniteGuard
    shutdown: GracefulShutdown
    metrics: RunMetrics
    _before: dict[str, Any] | None = None  # the state before the step under way

    def resume(self) -> None:
        """Loads the checkpoint to resume from, if there is one. Mutates `state` and the parts. Collective.

        Raises ConfigError where it is refused. Only after that the run's config.json is written.
        """
        try:
            self._load()
        except CheckpointError as error:
            raise ConfigError.of("checkpoint.resume", self.config.checkpoint.resume, str(error)) from error
        self.world.accept()
        if self.world.is_main:
            named = with_names(self.config).model_dump(mode="json")  # a start on other nodes finds the same files
            write_atomically(Path(self.config.train.run_dir) / CONFIG_FILE, [json.dumps(named, indent=2)])

    def _load(self) -> None:
        loaded = self.checkpoints.load_latest()
        if loaded is not None:
            self.prompts.load_state_dict(loaded["prompts"])
            self.carried.load(loaded["carried"], loaded.get("carried_from"))
            self.backend.load_state_dict(loaded.get("engine", {}))
            self.drafter.load_state_dict(self.checkpoints.load_drafter())
            self.state.step = loaded["step"]
            self.state.evaluations = [EvalResult(**e) for e in loaded["evaluations"]]
        self.rollout_cache.start(self.state.step)

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

    def save_if_due(self) -> None:
        """Publishes a finished checkpoint and starts one where `checkpoint.every` asks for it. Collective."""
        with self.metrics.phase("checkpoint"):
            # Weights that may be broken must not push good ones out, and those of no update cannot be loaded again.
            is_good = not self.nonfinite.in_a_row and self.policy.has_stepped
            self.checkpoints.maybe_save(self.state.step, self._snapshot, self.drafter.state_dict, is_good)
            self.rollout_cache.remove_until(self.checkpoints.newest)

    def end_step(self) -> None:
        """After a step. Collective.

        Raises TrainingError after too many skipped updates, GracefulExit after a signal.
        """
        self.nonfinite.check()
        self.shutdown.sync_after_step()

    def save_and_leave(self, reason: GracefulExit) -> None:
        """A checkpoint of the last finished step; the unfinished one leaves no trace in it. Collective."""
        step = self.state.step
        why = f"{self.shutdown.reason()}: {reason}; "
        ended = f"ended by a signal after step {step} of {self.config.train.num_steps}"
        if not self.policy.has_stepped:  # such a checkpoint could not be loaded again
            self.metrics.note(f"{why}there was no update yet, the next start begins anew")
            self.world.ends_early(False, f"{ended}, before the first update; the same command begins anew")
            return
        if self._before is not None:
            self.drafter.drop_window()
        if self.nonfinite.in_a_row:
            self.checkpoints.wait()
            self.metrics.note(f"{why}not saved, for updates were not finite; the next start goes on before them")
            self.world.ends_early(False, f"{ended}, not saved; the same command goes on before it")
            return
        with self.metrics.phase("checkpoint"):
            self.checkpoints.save_now(step, self._before or self._snapshot(), self.drafter.state_dict)
        self.metrics.note(f"{why}saved after step {step}, the next start goes on there")
        self.world.ends_early(True, f"{ended}; saved, the same command goes on")

    def finish(self) -> Path | None:
        """After the last step: saves it, also where the last save was put off. Returns the newest one. Collective."""
        with self.metrics.phase("checkpoint"):
            if self.config.checkpoint.every and self.policy.has_stepped:
                # After an update that was skipped the weights are those before it; older checkpoints stay beside it.
                is_good, step = not self.nonfinite.in_a_row, self.state.step
                self.checkpoints.save_now(step, self._snapshot(), self.drafter.state_dict, prune=is_good)
            self.checkpoints.wait()
        self.rollout_cache.clear()
        return self.checkpoints.latest()

    def close(self) -> None:
        """Frees its parts; the checkpoints' last, for from there on another job may use the run directory."""
        self.shutdown.close()
        self.rollout_cache.close()
        self.checkpoints.close()

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.state.step,
            "prompts": self.prompts.state_dict(),
            "carried": self.carried.groups,
            "carried_from": self.carried.oldest_position,
            "evaluations": [asdict(e) for e in self.state.evaluations],
            "engine": self.backend.state_dict(),
        }

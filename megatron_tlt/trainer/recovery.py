"""Recovery of an RL run: the state that its checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import CheckpointError
from megatron_tlt.trainer.evaluation import EvalResult

if TYPE_CHECKING:
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.drafters.training.run_drafter import RunDrafter
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.trainer.carry_over import CarriedGroups


@dataclass
class TrainState:
    """How far a run is. A checkpoint holds it beside policy, optimizer and schedule."""

    step: int = 0  # steps done
    empty_steps: int = 0  # the last ones in a row in which no response was trained on, see `EmptySteps`
    evaluations: list[EvalResult] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Recovery:
    """One rank's part. Checkpoints save and restore `state` and the other parts."""

    state: TrainState
    prompts: PromptStream
    carried: CarriedGroups
    backend: RolloutBackend
    drafter: RunDrafter
    _before: dict[str, Any] | None = None  # the state before the step under way

    def load(self, loaded: Mapping[str, Any]) -> None:
        """Goes on from the state that a checkpoint holds. Mutates `state` and the parts. Collective. Raises
        CheckpointError for a state that lacks an entry.
        """
        try:
            self.prompts.load_state_dict(loaded["prompts"])
            self.carried.load(loaded["carried"], loaded["carried_from"])
            self.backend.load_state_dict(loaded["engine"])
            self.drafter.load_state_dict(loaded["drafter"])
            self.state.step = loaded["step"]
            self.state.empty_steps = loaded["empty_steps"]
            self.state.evaluations = [EvalResult(**e) for e in loaded["evaluations"]]
        except KeyError as error:
            raise CheckpointError(f"the checkpoint's state has no {error}: another version wrote it") from error

    def begin_step(self) -> None:
        """Before a step: records the state that a checkpoint gets if a signal drops the step."""
        self._before = self._snapshot()

    def step_done(self) -> None:
        """After the step's last change to policy and drafter: no signal drops it any more."""
        self.state.step += 1
        self._before = None

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

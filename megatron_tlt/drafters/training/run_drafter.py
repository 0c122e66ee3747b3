"""`RunDrafter`: the drafter as a run's steps see it, in this order.

    begin_step      rollouts by a policy version begin
    collecting      around a rollout
    train_step      in idle windows, as often as they last
    merge           replicas get one drafter again
    unpublished     tensors for the weight sync; then `mark_published`

No call here can change a response (docs/design/numerics.md): the drafter only proposes, and the policy's
gradients, weights and rewards do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_tlt.drafters.checkpoint import drafter_differences
from megatron_tlt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.drafters.model import DrafterConfig
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.observe.reduction import RankMetrics
    from megatron_tlt.types import HiddenStateSample

    Tables = Callable[[], tuple[Tensor, Tensor]]  # reads an engine's embedding and LM head [V, H]


class RunDrafter:
    """One rank's drafter in a run that does not train it: a checkpoint's is served, and kept in this run's checkpoints
    for a run that trains it again.
    """

    actor_layers: tuple[int, ...] | None = None  # policy layers that the actor reads for `take_step`; None: it need not

    def __init__(self, config: DrafterConfig | None, replica: int = 0):
        """`config`: of the trained drafter in the engine of this rank, which is of `replica`; None: it has none."""
        self._config, self._replica = config, replica
        self._checkpointed: Mapping[str, Any] | None = None
        self._published: int | None = 0  # version of the drafter in the engines; None: another one than this rank's

    # -- a step ---------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int, tables: Tables) -> None:
        """Rollouts by `policy_version` begin in the engine that `tables` reads."""

    @contextmanager
    def collecting(self, backend: RolloutBackend) -> Iterator[None]:
        """Around a rollout: the engine's hidden states of finished responses go to the training buffer."""
        yield

    def take_step(self, samples: Sequence[HiddenStateSample], left_out: int) -> None:
        """Adds responses with hidden states that the actor computed; `left_out` did not fit."""

    def num_samples(self) -> int:
        """Sequences in the training buffer."""
        return 0

    def train_step(self) -> Mapping[str, float] | None:
        """One micro-step: its metrics; None if there is nothing to train on. Collective among the ranks of a replica.

        Raises DrafterError if training failed.
        """
        return None

    def merge(self, at_once: bool = True) -> dict[str, float]:
        """Merges the drafters of all replicas, without `at_once` only where that is worth its time. Collective. Returns
        metrics.
        """
        return {}

    def unpublished(self) -> tuple[Mapping[str, Tensor], int] | None:
        """Tensors and version of the drafter that the engines do not have yet; None: they have it, or use none."""
        if self._checkpointed is None or self._config is None or self._published is not None:
            return None
        return self._checkpointed["model"], int(self._checkpointed["version"])

    def mark_published(self, version: int) -> None:
        """The engines have the drafter of `version`."""
        self._published = version

    def buffer_metrics(self) -> RankMetrics:
        """Counters of this rank's training buffer."""
        return {}

    def drop_window(self) -> None:
        """Undoes the training since the last merge: the step is dropped. Called on every rank."""

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any] | None:
        """What `load_state_dict` takes; the first rank of the first replica gets the tensors, None on other replicas.
        Collective.
        """
        return None if self._replica else self._checkpointed

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads what `state_dict` returned; None: the checkpoint has no drafter.

        Raises CheckpointError for a drafter that is not the engine's.
        """
        if state is not None:
            self._check(state)
            self._published, self._checkpointed = None, state

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for another drafter's state: its tensors may fit all the same."""
        if self._config is not None and (wrong := drafter_differences(state["about"], self._config)):
            raise CheckpointError(f"the checkpoint's drafter does not fit this run: {'; '.join(wrong)}")

"""The part that all backends share: versions of the served weights, and the history of earlier responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.speculation.history import ResponseHistory

if TYPE_CHECKING:
    from megatron_tlt.sync.served_weights import ServedWeights
    from megatron_tlt.types import HiddenStateSample, PastResponse, Prompt, Sample, Trajectory


_LENGTHS_MIB = 64  # of a history without tokens: some 300,000 prompts of a data set


class BaseBackend:
    """Versions, checksums and history of a `RolloutBackend`."""

    def __init__(self, weights: ServedWeights, history: ResponseHistory | None = None):
        """`history` keeps earlier responses; by default their lengths."""
        self._weights, self._history = weights, history or ResponseHistory(1, 0, _LENGTHS_MIB)

    @property
    def policy_version(self) -> int:
        """The version of the weights that generate now; -1 before there are any."""
        return self._weights.version

    def release_weights(self) -> None:
        """Nothing to do: this engine keeps its weights."""
        return

    def weight_checksums(self) -> dict[str, int]:
        """CRC-32 of every tensor as received in the last weight sync; empty unless the backend keeps them."""
        return dict(self._weights.checksums)

    def read_responses(
        self, responses: Sequence[Trajectory], seed: int, sink: Callable[[HiddenStateSample], None]
    ) -> None:
        """Raises BackendError: this engine reads none."""
        raise BackendError("this kind of engine does not read finished responses")

    def trace_drafts(self, num_prompts: int) -> None:
        """Raises BackendError: this engine has no trace."""
        raise BackendError("this kind of engine does not trace its drafts")

    def drafts_of(self, sample: Sample) -> dict[str, Any] | None:
        """None: this engine has no trace."""
        return None

    @property
    def history_responses(self) -> int:
        """Responses of a prompt whose tokens `remember` keeps; 0: lengths only."""
        return self._history.most_responses

    def remember(self, responses: Sequence[PastResponse]) -> None:
        """Keeps scored responses for later epochs of their prompts. Ranks of one engine must pass the same."""
        self._history.remember(responses)

    def state_dict(self) -> dict[str, Any]:
        """The history, JSON-able: lengths decide the order of prompts, which a resumed run must repeat. What was
        measured of drafts is not in it: the next start measures, perhaps on another machine.
        """
        return {"history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; ignores other entries, as checkpoints had them."""
        self._history.load_state_dict(state["history"])

    def ordered(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """`prompts` in the order in which they should start, those with long earlier responses first; the same on every
        rank. It changes no keyed response (docs/design/numerics.md).
        """
        return self._history.longest_first(prompts)

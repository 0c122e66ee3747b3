"""Protocols between packages that do not import each other, and the capabilities of each kind of rollout engine. Each
method says what it mutates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from megatron_tlt.types import (
        BackendName,
        EngineStats,
        GenerateCall,
        HiddenStateSample,
        PastResponse,
        Prompt,
        Sample,
        Trajectory,
        TurnResult,
        WeightBucket,
    )

RankOutcome = Literal["done", "saved", "ended", "failed", "timeout"]
"""How a rank ends; saved, ended: before the run's end, with and without a checkpoint."""


class RankMonitor(Protocol):
    """Gets a rank's phases and signs of life, so that a hang is found."""

    def enter(self, phase: str, step: int) -> None:
        """The rank enters a phase."""

    def report(
        self, *, state: str = "", running: int = 0, queued: int = 0, longest: int = 0, left: float = 0.0
    ) -> None:
        """A sign of life within a phase: state in an idle window; requests that decode and that wait; tokens of the
        longest running response; tokens still expected.
        """

    def close(self, outcome: RankOutcome, detail: str = "", at_fault: Sequence[int] = ()) -> None:
        """The rank ends; after "timeout" it waited in vain for the ranks `at_fault`. A second call does nothing."""


class TurnSource(Protocol):
    """The environments of one rollout; they see texts, the engine sees tokens."""

    def submit(self, prompt: Prompt, sample_index: int, turn: int, token_ids: Sequence[int], text: str) -> None:
        """Passes a drawn turn (its tokens with the stop token, its text) to the trajectory's environment; returns at
        once.
        """

    def poll(self, timeout_s: float = 0.0) -> list[TurnResult]:
        """Results that have come, in no order; waits for the first one at most `timeout_s`."""

    def discard(self, prompt_id: int, sample_index: int) -> None:
        """The trajectory has ended (length, signal): closes its environment."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCapabilities:
    """Capabilities of a kind of rollout engine; `check` refuses a configuration that needs more."""

    keyed_sampling: bool = False  # a response is a function of seed, prompt and policy, the same bits with any drafter
    selectors: bool = False  # our selectors decide how much each step drafts
    hidden_states: bool = False  # the policy's hidden states of responses can be had, to train a drafter
    logprobs: bool = False  # samples carry log-probs; if not, no importance weights
    stop_strings: bool = False  # responses can end at a string, whatever its tokens
    tensor_parallel: bool = False  # one engine on several ranks
    routed_experts: bool = False  # responses can name the experts that their tokens chose
    in_process: bool = False  # drafts of single responses are known, and finished ones can be read
    drafters: tuple[str, ...] | None = None  # values of `rollout.speculation.drafter` that it has; None: all
    turns: bool = False  # a response may have turns of an environment between those that it draws
    pre_rollouts: bool = False  # drafts that a call brings are verified, and `until` ends a call


_ALL = BackendCapabilities(
    keyed_sampling=True, selectors=True, hidden_states=True, logprobs=True, stop_strings=True, tensor_parallel=True,
    routed_experts=True, in_process=True, turns=True, pre_rollouts=True,
)  # fmt: skip
CAPABILITIES: dict[BackendName, BackendCapabilities] = {
    "embedded": _ALL,
    "trtllm": BackendCapabilities(drafters=("none", "eagle3")),
    # Log-probs are the actor's: the engine's differ in the last bits with the batch.
    "vllm": replace(_ALL, logprobs=False, in_process=False),
}


class RolloutBackend(Protocol):
    """An engine that generates responses to prompts with one version of the policy."""

    @property
    def capabilities(self) -> BackendCapabilities:
        """The capabilities of this kind of engine."""

    @property
    def policy_version(self) -> int: ...

    def generate(self, call: GenerateCall) -> list[Sample]:
        """All samples of all prompts of the call, sorted by (prompt_id, sample_index).

        The engine reads the next prompt when it has room for more requests, ranks of one engine at the same step; an
        engine without keyed sampling reads all at once. Returns when this replica has no live request. Mutates the KV
        cache and `stats`. Raises BackendError while weights are torn.
        """

    def ordered(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """`prompts` in the order in which they should start, the same on every rank. Mutates nothing."""

    def running_lengths(self) -> np.ndarray:
        """Tokens that each running response has so far, int [B]. Mutates nothing."""

    def collect_hidden_states(
        self,
        sink: Callable[[HiddenStateSample], None] | None,
        offer: Callable[[HiddenStateSample], bool] | None = None,
    ) -> None:
        """From now on calls `sink` with the hidden states of every finished response; None: collects none.

        An engine in this process first calls `offer` with states on the meta device, and reads those only for which
        it is True. Only without live requests. Mutates the engine.
        """

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        """Embedding and LM head [V, H] of the policy that generates, in the engine's type: its own memory where it
        keeps them contiguous, else put together. Good until the next weight sync. Collective among the ranks of one
        engine.

        Raises BackendError where the engine was started without.
        """

    def read_responses(
        self, responses: Sequence[Trajectory], seed: int, sink: Callable[[HiddenStateSample], None]
    ) -> None:
        """Calls `sink` with each of these finished responses of at least two tokens and the hidden states that one
        prefill computes, in any order. Their (prompt id, sample index) differ; `seed` is that of their sampling keys.
        Only without live requests and while no states are collected. Mutates the KV cache and `stats`. Raises
        BackendError from an engine without `capabilities.in_process`.
        """

    def trace_drafts(self, num_prompts: int) -> None:
        """From the next `generate` on keeps the drafts of the first `num_prompts` prompts of each (of evaluations,
        too), for `drafts_of`, in place of those kept so far; not of a `generate` with `GenerateCall.until`. Raises
        BackendError from an engine without `capabilities.in_process`.
        """

    def drafts_of(self, sample: Sample) -> dict[str, Any] | None:
        """Drafts of a response since the last `trace_drafts`, as `observe.rollouts` writes them; None: not known."""

    @property
    def history_responses(self) -> int:
        """Responses of a prompt whose tokens `remember` keeps; 0: lengths only."""

    def remember(self, responses: Sequence[PastResponse]) -> None:
        """Keeps scored responses for later epochs of their prompts; never changes a response.

        Ranks of one engine must pass the same. Mutates the history.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must go on with: expected lengths of responses, JSON-able. Mutates nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned. Mutates the history."""

    def release_weights(self) -> None:
        """Gives back the weights' memory, where the engine can, since nothing is generated before the next weight sync,
        which brings all of them. Mutates the engine.
        """

    def begin_update(self, version: int) -> None:
        """Opens a weight sync; until `finish_update` the engine refuses to generate. Mutates the version state."""

    def update_weights(self, bucket: WeightBucket) -> None:
        """Loads some full tensors of the open weight sync. Mutates the weights."""

    def update_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads all tensors of the drafter in the open weight sync: it is served with the new policy or not at all.

        `version` counts the drafter's own publications. Mutates the drafter. Raises SyncError.
        """

    def finish_update(self) -> None:
        """Closes the weight sync: every tensor must have come. Mutates the versions. Raises SyncError."""

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every tensor as it was received in the last weight sync (`sync.verify`). Mutates nothing."""

    def take_stats(self) -> EngineStats:
        """Counters since the last call. Resets them."""

    def close(self) -> None:
        """Frees memory, processes and sockets. The backend cannot be used afterwards."""

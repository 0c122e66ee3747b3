"""Values that cross floors. Torch-free: tensors stay inside the packages that own them.

Legend: P prompt tokens, R response tokens, L = P + R.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from megatron_tlt.interfaces import TurnSource

BackendName = Literal["embedded", "trtllm", "vllm"]
TurnsEnd = Literal["env", "max_turns", "cut"]
FinishReason = Literal["stop", "length", "carry", "abort"] | TurnsEnd
"""Stop token or string; token limit; unfinished, the next step continues it (`rollout.carry_over`); dropped, or its
environment failed. `TurnsEnd`: the environment has ended the trajectory; `env.max_turns` has, before its environment;
the environment has, by a limit of its own or after a turn that `env.max_turn_tokens` cut."""
Span = tuple[int, int]  # half-open, of response positions
Drawn = tuple[int, int]  # policy version, response tokens in a row that this policy drew
Answer: TypeAlias = str | tuple[str, ...]  # a reference answer, or all those that are acceptable
_SAME_WAIT_S = 0.005  # between two polls of the same wait
ProgressCallback = Callable[[int, int, int], None]
"""Called during a rollout with (running requests, waiting requests, tokens generated so far)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. `temperature == 0` is greedy.

    Masks apply in this order: temperature, top-k, top-p, min-p (the order of Hugging Face's warpers).
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    max_tokens: int = 256  # of the whole response, drawn and given
    max_turn_tokens: int = 0  # drawn in one turn, in a call with environments; 0: no limit of its own
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    max_call_tokens: int = 0  # of a response, drawn in one `generate`, which then ends as "carry"; 0: no limit


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, tokenized.

    `prompt_id` is the ordinal in the prompt stream: unique for every draw, part of the sampling key, so the
    second epoch of a prompt gets fresh noise. `dataset_id` names the prompt itself and is
    the same on every epoch.
    """

    prompt_id: int
    dataset_id: str
    token_ids: tuple[int, ...]
    text: str
    answer: Answer | None = None
    task: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of its environment, 31 bits: another one on every epoch
    row_text: str | None = None  # `text` as its row has it, where the environment's opening stands behind it

    @property
    def answers(self) -> tuple[str, ...]:
        """The acceptable reference answers; empty without one."""
        return () if self.answer is None else (self.answer,) if isinstance(self.answer, str) else self.answer


@dataclass(slots=True)
class Sample:
    """One response. `logprobs[t]` is log softmax(logits / temperature) at the sampled token, before top-k/p masks.

    The policy draws a response's tokens, but for the spans `given`: tokens of an environment (a tool's output, say),
    which the engine appends to the response. They count as positions and as context. Their log-prob is 0.
    """

    prompt_id: int
    sample_index: int
    # [R], with the stop token when one ended it. This and the next are lists, or arrays where they are kept (`packed`).
    token_ids: list[int] | array[int]
    logprobs: list[float] | array[float]  # [R], or empty from an engine that has none (`BackendCapabilities.logprobs`)
    text: str
    finish_reason: FinishReason
    policy_version: int
    # [P + R - 1, layers with experts, k] uint8, or int16 with more than 256 experts: those that the engine chose for
    # each token that it fed (all but the last one), in any order. None: not recorded.
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    given: tuple[Span, ...] = ()  # ascending, disjoint
    turn_rewards: list[float] = field(default_factory=list)  # the environment's, by turn that it has answered
    failure: str | None = None  # of the environment; then `finish_reason` is "abort"
    # Waited for the environment, by turn, the one that it failed to answer included.
    turn_seconds: list[float] = field(default_factory=list, compare=False)
    earlier: tuple[Drawn, ...] = ()  # tokens that earlier steps drew, from the start; `policy_version` drew the others

    def packed(self) -> Sample:
        """The same with tokens as int32 and log-probs as float32, which they are: 8 bytes a token, lists take 80."""
        return replace(self, token_ids=array("i", self.token_ids), logprobs=array("f", self.logprobs))

    def unpacked(self) -> Sample:
        """The same with lists."""
        return replace(self, token_ids=list(self.token_ids), logprobs=list(self.logprobs))

    @property
    def is_truncated(self) -> bool:
        """Whether a limit has ended the response, of tokens or of turns."""
        return self.finish_reason in ("length", "max_turns", "cut")

    @property
    def num_drawn(self) -> int:
        """Response tokens that the policy drew."""
        return len(self.token_ids) - sum(end - begin for begin, end in self.given)

    @property
    def drawn_by(self) -> tuple[Drawn, ...]:
        """The whole response by the policies that drew it."""
        return (*self.earlier, (self.policy_version, len(self.token_ids) - self.num_earlier))

    @property
    def num_earlier(self) -> int:
        """Response tokens that earlier steps drew."""
        return sum(count for _, count in self.earlier)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What an environment returned for a drawn turn, as tokens."""

    prompt_id: int
    sample_index: int
    given: tuple[int, ...]  # tokens that the response continues with; empty where the trajectory has ended
    reward: float = 0.0  # of this turn
    ended: TurnsEnd | None = None  # why the trajectory ends; None: it goes on
    failure: str | None = None  # why the environment returned nothing: the trajectory ends as "abort"
    seconds: float = field(default=0.0, compare=False)  # since the turn was submitted


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of one `RolloutBackend.generate`, and the callbacks that it calls meanwhile."""

    prompts: Iterable[Prompt]
    params: SamplingParams
    num_samples: int = 1  # of each prompt
    on_progress: ProgressCallback | None = None
    """Called now and then, at the same steps by all ranks of one engine, and not while a step hangs. If it raises, all
    requests are dropped and the engine is idle again, or killed if it hangs.
    """
    have: Collection[tuple[int, int]] = ()
    """Responses (prompt id, sample index) that are neither generated nor returned; equal on ranks of one engine."""
    on_response: Callable[[Sample], None] | None = None
    """Called with each response as soon as it is finished."""
    begun: Mapping[tuple[int, int], Sample] = field(default_factory=dict)
    """Responses, by prompt id and sample index, that earlier calls left unfinished: this one continues them."""
    drafts: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """Responses, int32 by prompt id and sample index, that an earlier policy drew with the same keys (pre-rollouts):
    proposals, which may be partial, wrong or foreign. Equal on ranks of one engine.
    """
    until: Callable[[], bool] | None = None
    """Asked between two steps, on the first rank of an engine. Once true `generate` ends and also returns the
    unfinished responses that have a token, with finish reason "abort"; the engine is idle.
    """
    most_running: int | None = None
    """Prompts are taken while fewer requests than these run or wait; None: as long as the engine has room."""
    turns: TurnSource | None = None
    """The environments: each drawn turn goes to one, and its answer continues the response. Of the ranks of one engine
    the first one's are used; the others pass theirs all the same.
    """
    while_parked: Callable[[float], bool] | None = None
    """Called again and again while every request waits for its environment, with the seconds of this wait so far. Does
    a piece of other work, and returns whether there was any. Collective among the ranks of one engine.
    """
    check_interrupt: Callable[[], None] | None = None
    """As `on_progress`, and before it; called also while a step of an engine of one rank hangs."""


@dataclass(slots=True)
class Trajectory:
    """The tokens of a prompt and its response, and which of them the policy drew.

    Prompt tokens and the spans `given` of the response are context: they have no loss and no drafts. A sampling key's
    position counts all response tokens, drawn or given.
    """

    prompt_id: int
    sample_index: int
    token_ids: np.ndarray  # int32 [L]
    logprobs: np.ndarray  # float32 [R], the engine's: 0 where given; NaN from an engine without
    given: tuple[Span, ...] = ()
    finish_reason: FinishReason = "stop"
    policy_version: int = 0
    routed_experts: np.ndarray | None = None  # [L - 1, ...] as in `Sample`; -1: unknown
    drawn_by: tuple[Drawn, ...] = ()  # as `Sample.drawn_by`; empty: `policy_version` drew all

    @classmethod
    def of(cls, prompt: Sequence[int] | np.ndarray, sample: Sample) -> Trajectory:
        """The response `sample` behind the tokens of its prompt."""
        assert not sample.logprobs or len(sample.logprobs) == len(sample.token_ids)
        return cls(
            sample.prompt_id,
            sample.sample_index,
            token_ids=np.concatenate((np.asarray(prompt, np.int32), np.asarray(sample.token_ids, np.int32))),
            # A loss that read log-probs which the engine does not have would be NaN.
            logprobs=np.array(sample.logprobs or np.full(len(sample.token_ids), np.nan), np.float32),
            given=sample.given,
            finish_reason=sample.finish_reason,
            policy_version=sample.policy_version,
            routed_experts=sample.routed_experts,
            drawn_by=sample.drawn_by,
        )

    @property
    def length(self) -> int:
        """L, tokens of prompt and response together."""
        return len(self.token_ids)

    @property
    def response_start(self) -> int:
        """P, position of the first response token."""
        return len(self.token_ids) - len(self.logprobs)

    @property
    def drawn(self) -> np.ndarray:
        """Bool [R]: response tokens that the policy drew."""
        drawn = np.ones(len(self.logprobs), np.bool_)
        for begin, end in self.given:
            drawn[begin:end] = False
        return drawn


@dataclass(slots=True)
class PastResponse:
    """A scored response as the next epoch of its prompt may use it: for drafts, and to expect a length."""

    dataset_id: str
    token_ids: np.ndarray  # int32 [R]; empty where only the length is read
    score: float
    prompt_id: int  # prompt id of the epoch: later epochs have greater ones
    length: int = -1  # R; by default as many as are given

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = len(self.token_ids)


@dataclass(slots=True)
class RewardResult:
    """The reward of one sample. `failure`: why a reward function returned none (the value is then its default)."""

    value: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt with their rewards: the input of group-relative algorithms."""

    prompt: Prompt
    samples: list[Sample]
    rewards: list[RewardResult] = field(default_factory=list)

    def judged(self) -> list[RewardResult]:
        """The rewards of the samples whose environment did not fail."""
        return [r for r, sample in zip(self.rewards, self.samples, strict=True) if sample.finish_reason != "abort"]


@dataclass(slots=True)
class TrainSequence:
    """A trajectory with the values of its loss, one a response token.

    The mask begins as 1 where a token was drawn and 0 where it was given. Whatever else leaves tokens out of the loss
    multiplies it. `weight` multiplies every token's loss (an algorithm's own normalisation, for example 1 / drawn
    tokens).
    """

    trajectory: Trajectory
    advantages: np.ndarray  # float32 [R]
    loss_mask: np.ndarray  # float32 [R]
    weight: float = 1.0

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrainSequence:
        """The trajectory without advantages yet."""
        mask = trajectory.drawn.astype(np.float32)
        return cls(trajectory, np.zeros_like(mask), mask)


@dataclass(slots=True)
class TrainBatch:
    """The data with which this data-parallel rank updates the policy in one step.

    `mini_batches` are optimizer steps in order (the same count on every data-parallel rank; a list may be
    empty). `denominators[i]` is the world-wide divisor of mini-batch i's loss sum: computed once by the
    algorithm from the whole batch, so the gradient does not depend on how sequences are split over ranks. Responses
    that have no gradient are counted there and are in no list.
    """

    mini_batches: list[list[TrainSequence]]
    denominators: list[float]
    temperature: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class TrainOutput:
    """The result of an update. `policy_version` counts updates of the weights since step 0."""

    policy_version: int
    metrics: dict[str, float]
    skipped: bool = False


@dataclass(slots=True)
class WeightBucket:
    """Some full (unsharded) tensors under their Hugging Face names, on their way to an engine."""

    version: int
    tensors: list[tuple[str, Tensor]]


LEAST_TRAINED = 2  # tokens of a response that a drafter trains on: it has no draft of the first one


@dataclass(frozen=True, slots=True)
class HiddenStateSample:
    """A trajectory with the policy's hidden states, as the engine computed them (`rollout.hidden_states`).

    W is the width of a state: H, the policy's hidden size, and H more for each layer that a drafter of kind eagle3 or
    dspark reads: their outputs (residual stream), ascending, before the state after the final norm. The last token was
    drawn and never fed: it has no state.
    """

    trajectory: Trajectory
    hidden: Any  # Tensor [L - 1, W] of positions 0 .. L - 2; on the CPU, in the engine's type
    key: int = 0  # the request's sampling key


DraftedBy = Literal["none", "suffix", "trained", "pre_rollout"]
"""The source of a step's drafts: none, the suffix drafter, the trained one, or pre-rollouts (other rows of such a
step draft by the suffix or the trained drafter)."""


@dataclass(frozen=True, slots=True)
class DraftStrategy:
    """How one step speculates.

    `kind` names the source of drafts; "none" is plain decoding. Each request drafts up to `draft_len` tokens in a row.
    The draft ends before a token whose cumulative acceptance, the estimated probability that the policy emits it, is
    below `min_cumulative_acceptance`.
    """

    kind: DraftedBy
    draft_len: int
    min_cumulative_acceptance: float = 0.0

    @property
    def name(self) -> str:
        """`kind_len`, as in reports; "none" for plain decoding."""
        return "none" if self.kind == "none" else f"{self.kind}_{self.draft_len}"


NO_DRAFT = DraftStrategy("none", 0)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One measured decoding step, plain or speculative: the input of strategy selectors. L: the longest draft."""

    strategy: DraftStrategy
    num_running: int  # B, requests in the step
    num_rows: int  # rows fed to the policy: B and the drafted tokens that were verified
    draft_seconds: float  # of proposing; 0 for plain decoding
    step_seconds: float  # of the policy's forward, sampling and verification; scheduling and commit are in neither
    num_emitted: int  # tokens emitted by all B requests
    longest: int  # tokens that a row might draft: the strategy's, or fewer where rows or blocks were short
    accepted: np.ndarray  # int64 [L], drafted tokens at each position (from 0) that were emitted; plain: [0]


@dataclass(slots=True)
class SpeculationStats:
    """Counters of steps with drafts, of all sources of drafts. Lists are by draft position (index 0: the first drafted
    token).
    """

    steps_by_strategy: dict[str, int] = field(default_factory=dict)  # of pure decoding steps, "none" included
    row_steps: int = 0  # rows with a draft, summed over steps
    drafted_tokens: int = 0  # fed to the policy for verification
    emitted_tokens: int = 0  # accepted drafts and bonus tokens of those rows; embedded: up to a response's end
    accepted_tokens: int = 0  # of `drafted_tokens`, also behind the end of a response
    pre_rolled_rows: int = 0  # of `row_steps`, rows whose draft was of a pre-rollout
    pre_rolled_drafted: int = 0  # of `drafted_tokens`, theirs
    pre_rolled_accepted: int = 0  # drafted tokens of theirs that were accepted
    drafted_at: list[int] = field(default_factory=list)  # rows whose draft reached the position
    accepted_at: list[int] = field(default_factory=list)  # rows that accepted the token there
    by_batch: dict[int, list[int]] = field(default_factory=dict)  # running requests: [row steps, emitted tokens]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    switches: list[tuple[float, bool]] = field(default_factory=list)
    """(seconds of time.perf_counter, whether steps have drafted tokens from then on); at first they have none."""

    @property
    def accept_length(self) -> float:
        """Mean tokens that a row emits in a step in which it has a draft (1: nothing was accepted)."""
        return self.emitted_tokens / self.row_steps if self.row_steps else 0.0


@dataclass(slots=True)
class EngineStats:
    """Counters of a rollout engine since its last reset."""

    steps: int = 0
    prefill_steps: int = 0  # of `steps`: those without a decoding request
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    graph_replays: int = 0  # forwards, also a drafter's, by a captured graph
    graph_misses: int = 0  # those that could have one and ran without
    turns: int = 0  # drawn to their end and passed to an environment
    given_tokens: int = 0
    parked_seconds: float = 0.0  # in which every request waited for its environment; not in `seconds`
    parked_spans: list[tuple[float, float]] = field(default_factory=list)  # these waits, seconds of time.perf_counter
    seconds: float = 0.0
    started: float = 0.0  # seconds of time.perf_counter that the curve counts from
    running_curve: list[tuple[float, int]] = field(default_factory=list)  # (seconds since start, running requests)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add_parked(self, begin: float, end: float) -> None:
        """Counts a wait, in seconds of time.perf_counter; soon after the last one it continues that one. Mutates."""
        self.parked_seconds += end - begin
        if self.parked_spans and begin - self.parked_spans[-1][1] < _SAME_WAIT_S:
            begin, _ = self.parked_spans.pop()
        self.parked_spans.append((begin, end))

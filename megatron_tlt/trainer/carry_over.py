"""`CarriedGroups`: groups with responses that the next step continues (`rollout.carry_over`, partial rollouts).

    step 1, policy 0   new prompts -> each response draws at most C tokens --+-- group complete: scored and trained
                                                                             +-- a member is unfinished: carried
    step 2, policy 1   carried groups, then as many new ones as fit ---------+-- ...

A response that a step leaves unfinished goes on in the next one under its policy, so token t is drawn by the policy of
the step in which its position falls, with the noise of (seed, prompt, sample, t). Which responses are carried is a
function of seed and policies: of no time, rank or draft. A group is trained in the step in which its last member ends;
members that ended earlier wait for it. A step generates at most `train.prompts_per_step` groups' worth of responses:
those that it continues, and new groups as long as they fit. So an update has more or fewer groups than that, and in the
long run as many as are begun.

Every rank holds all carried groups, in arrays: any replica may continue any of them, and rank 0 saves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_tlt.distributed.exchange import gather_large
from megatron_tlt.errors import CheckpointError
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.observe.reduction import Metric, RankMetrics, Reduce, sums
from megatron_tlt.resilience.response_lines import prompt_crc
from megatron_tlt.trainer.batch_assembly import group_samples, token_ages
from megatron_tlt.types import Sample, SampleGroup

if TYPE_CHECKING:
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.rollout_cache import Responses
    from megatron_tlt.types import Prompt


def is_unfinished(sample: Sample) -> bool:
    """Whether the next step continues this response."""
    return sample.finish_reason == "carry"


def _packed(group: SampleGroup) -> SampleGroup:
    return SampleGroup(group.prompt, [sample.packed() for sample in group.samples])


class CarriedGroups:
    """Those of one run, the same on every rank. Empty without `rollout.carry_over`."""

    def __init__(self, world: World, stream: PromptStream, rollout: RolloutSection):
        """`stream`: of the training prompts. Without `rollout.carry_over` nothing is carried."""
        self._world, self._stream, self._rollout = world, stream, rollout
        self._num_samples, self._carries = rollout.samples_per_prompt, rollout.carry_over is not None
        self.groups: list[SampleGroup] = []
        """By prompt id, without rewards, responses `packed`; never changed in place: a save may be under way."""
        self._positions: dict[int, dict[str, Any]] = {}  # of the stream, before the batch that had the prompt
        self._num_new = 0

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """New prompts of a step of `num_prompts` groups: as many as fit beside the responses that go on. Moves the
        stream.
        """
        begun = sum(is_unfinished(sample) for group in self.groups for sample in group.samples)
        before = self._stream.state_dict()
        prompts = self._stream.next_batch(max(0, num_prompts - -(-begun // self._num_samples)))
        self._positions |= {prompt.prompt_id: before for prompt in prompts}
        self._num_new = len(prompts)
        return prompts

    def responses(self) -> tuple[Responses, Responses]:
        """The carried responses, `packed`: the unfinished ones, and those that wait for others of their group."""
        begun: Responses = {}
        waiting: Responses = {}
        for group in self.groups:
            for sample in group.samples:
                (begun if is_unfinished(sample) else waiting)[sample.prompt_id, sample.sample_index] = sample
        return begun, waiting

    def take(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Those of this rank's `groups` whose members have all ended; carries those of all ranks that have one that has
        not. Collective with `rollout.carry_over`.
        """
        mine = [_packed(group) for group in groups if any(map(is_unfinished, group.samples))]
        everywhere = gather_large(self._world, mine or None) if self._carries else [mine]
        self.groups = sorted((g for part in everywhere for g in part), key=lambda g: g.prompt.prompt_id)
        self._positions = {g.prompt.prompt_id: self._positions[g.prompt.prompt_id] for g in self.groups}
        return [group for group in groups if not any(map(is_unfinished, group.samples))]

    def metrics(self, trained: Sequence[SampleGroup], version: int) -> RankMetrics:
        """Metrics of this rank: the carried groups (rank 0), and the ages of the tokens of its `trained` groups under
        policy `version`. None without `rollout.carry_over`.
        """
        if not self._carries:
            return {}
        row: RankMetrics = {}
        if self._world.is_main:
            begun, waiting = self.responses()
            counts = {"new_prompts": self._num_new, "waiting_groups": len(self.groups)}
            counts |= {"unfinished": len(begun), "waiting_responses": len(waiting)}
            row = sums({f"carry_over/{name}": value for name, value in counts.items()})
        ages = [token_ages(sample.drawn_by, version) for group in trained for sample in group.samples]
        count = float(sum(map(len, ages)))
        total, off_policy = sum(int(a.sum()) for a in ages), sum(int((a > 0).sum()) for a in ages)
        oldest = float(max((int(a.max(initial=0)) for a in ages), default=0))
        return row | {
            "carry_over/token_age": Metric(total, Reduce.MEAN, count),
            "carry_over/off_policy": Metric(off_policy, Reduce.MEAN, count),
            "carry_over/token_age_max": Metric(oldest, Reduce.MAX),
        }

    @property
    def oldest_position(self) -> dict[str, Any] | None:
        """The stream's position before the first prompt that is carried; None: none is. JSON-able."""
        return self._positions[self.groups[0].prompt.prompt_id] if self.groups else None

    def load(self, responses: Sequence[tuple[Sample, int]], position: dict[str, Any] | None) -> None:
        """Restores groups from a checkpoint: responses with their prompts' checksums, and `oldest_position`. The stream
        is where it was saved, and draws from the oldest position to there again. Mutates. Raises CheckpointError where
        the settings do not fit.
        """
        self.groups, self._positions = [], {}
        if position is None:
            return
        if not self._carries:
            raise CheckpointError(
                "the checkpoint carries over unfinished responses, rollout.carry_over is null: resume with a number; "
                "one below rollout.max_tokens by 1 finishes them in the next step"
            )
        here, ids = self._stream.state_dict(), {sample.prompt_id for sample, _ in responses}
        self._stream.load_state_dict(position)
        drawn = self._stream.next_batch(here["next_id"] - position["next_id"])
        self._stream.load_state_dict(here)  # other limits of prompts would have moved it
        prompts = [prompt for prompt in drawn if prompt.prompt_id in ids]
        crcs = {prompt.prompt_id: prompt_crc(prompt) for prompt in prompts}
        if any(crcs.get(sample.prompt_id) != crc for sample, crc in responses):
            raise CheckpointError("the responses that the checkpoint carries over belong to other prompts")
        self.groups = group_samples(prompts, [sample.packed() for sample, _ in responses])
        sizes = {len(group.samples) for group in self.groups}
        if sizes - {self._num_samples}:
            raise CheckpointError(
                f"the checkpoint carries over groups of {max(sizes)} responses, rollout.samples_per_prompt is "
                f"{self._num_samples}: resume with the same"
            )
        self._check_responses([sample for sample, _ in responses])
        self._positions = {prompt.prompt_id: position for prompt in prompts}

    def _check_responses(self, samples: Sequence[Sample]) -> None:
        """Raises CheckpointError for restored responses that the configured engine cannot continue or the update cannot
        read.
        """
        unfinished = [sample for sample in samples if is_unfinished(sample)]
        for stop in self._rollout.stop:
            if any(stop in sample.text for sample in unfinished):
                raise CheckpointError(
                    f"the checkpoint carries over an unfinished response with {stop!r}, which rollout.stop now has: "
                    "resume with the former ones"
                )
        longest = max((len(sample.token_ids) for sample in unfinished), default=0)
        most = self._rollout.max_tokens
        if longest >= most:
            raise CheckpointError(
                f"the checkpoint carries over an unfinished response of {longest} tokens, rollout.max_tokens is {most}"
                ": resume with more"
            )
        if CAPABILITIES[self._rollout.backend].logprobs and any(s.token_ids and not s.logprobs for s in samples):
            raise CheckpointError(
                "the checkpoint carries over responses without log-probs, which with rollout.backend: "
                f"{self._rollout.backend} are not computed: resume with the backend that drew them"
            )

"""`GroupSampler`: the scored groups of one step, from prompts to rewards.

    prompts -> rollout -> idle window (pre-rolls, trains) -> score         again where dynamic sampling drops groups
                   +-> with `rollout.carry_over`: groups with an unfinished response go on in the next step

Between two steps of its engine every rank reports its progress (`resilience.heartbeat`) and looks for a signal
(`resilience.shutdown`), which may cut the rollout short.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.errors import RewardError, UnjudgedError
from megatron_tlt.idle.policy import tokens_left
from megatron_tlt.trainer.batch_assembly import group_samples, share_responses
from megatron_tlt.trainer.dynamic_sampling import Dropped, look_at_kept
from megatron_tlt.trainer.environments import open_turns
from megatron_tlt.types import GenerateCall, SampleGroup, SamplingParams

if TYPE_CHECKING:
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.prompt_queue import PromptQueues
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.training.run_drafter import RunDrafter
    from megatron_tlt.idle.window import IdleWindow
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.observe.reduction import RankMetrics
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.rewards.pool import RewardPool
    from megatron_tlt.trainer.carry_over import CarriedGroups
    from megatron_tlt.trainer.environments import Environments
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.trainer.pre_rollouts import PreRoller
    from megatron_tlt.types import EngineStats, Prompt

_log = logging.getLogger(__name__)
_FIRST_LENGTH = 256.0  # tokens that a response is expected to have before any has ended


def sampling_params(config: Config) -> SamplingParams:
    """How whole responses of training are sampled."""
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop")
    most = 0 if config.env is None else config.env.max_turn_tokens or 0
    values = {name: getattr(config.rollout, name) for name in names}
    return SamplingParams(**values, max_turn_tokens=most, seed=config.train.seed)


def step_params(config: Config) -> SamplingParams:
    """`sampling_params` of the responses of one step, which may be parts of responses."""
    return replace(sampling_params(config), max_call_tokens=config.rollout.carry_over or 0)


@dataclass(kw_only=True, eq=False)
class GroupSampler:
    """Samples and scores the groups of one rank."""

    config: Config
    prompts: PromptStream
    carried: CarriedGroups
    queues: PromptQueues
    backend: RolloutBackend
    rollout_cache: RolloutCache
    shutdown: GracefulShutdown
    drafter: RunDrafter
    idle_window: IdleWindow
    rewards: RewardPool
    environments: Environments | None = None
    pre_rollouts: PreRoller | None = None
    algorithm: Algorithm
    metrics: RunMetrics
    traced_prompts: int = 0
    """Of each rollout, whose drafts the engine keeps until the next step."""
    _lengths: np.ndarray = field(default_factory=lambda: np.array([_FIRST_LENGTH]))
    """Tokens of the last rollout's responses, ascending."""

    def sample(self, step: int) -> tuple[list[SampleGroup], list[SampleGroup], RankMetrics]:
        """Of this rank in `step` (1-based): the groups to train on; all that were scored, also those that dynamic
        sampling drops; metrics of rollout cache, carried groups and dynamic sampling. Collective.

        Raises GracefulExit after a signal, UnjudgedError where no response was judged, or a rank cannot judge.
        """
        section, num_prompts = self.config.algorithm, self.config.train.prompts_per_step
        kept: list[SampleGroup] = []
        scored: list[SampleGroup] = []
        rounds, dropped = 0, Dropped()
        if self.traced_prompts:
            self.backend.trace_drafts(self.traced_prompts)
        self.drafter.begin_step(self.backend.policy_version, self.backend.lookup_tables)
        for _ in range(section.max_sampling_rounds if section.dynamic_sampling else 1):
            rounds += 1
            groups = self.carried.take(self._rollout(step, self._next_prompts(step, num_prompts)))
            with self.metrics.phase("score"), self.shutdown.unwatched("scoring"):
                failures = score(self.queues.world, self.rewards, groups)
                scored += groups
                if self.prompts.repeats:  # else no later step reads them
                    share_responses(self.queues.world, self.backend, groups)
                kept += [g for g in groups if self.algorithm.keep_group(g)]
                left = [g for g in groups if not self.algorithm.keep_group(g)]
                others = Dropped.of(left)
                _forget_experts(left)
                mine = [group.prompt.prompt_id for group in kept], judged_of(groups), others
                everywhere = self.queues.world.all_gather_object(mine)
                ids = sorted(prompt_id for of_rank, _, _ in everywhere for prompt_id in of_rank)
                dropped = sum((of_rank for *_, of_rank in everywhere), dropped)
                if why := why_unjudged([judged for _, judged, _ in everywhere]):
                    raise UnjudgedError(f"step {step}: {why}")
            if failures is not None:
                _log.warning(failures)
            if len(ids) >= num_prompts:
                break
        row = self.rollout_cache.end_step() | self.carried.metrics(kept, self.backend.policy_version)
        if section.dynamic_sampling:
            chosen = set(ids[:num_prompts])
            _forget_experts([group for group in kept if group.prompt.prompt_id not in chosen])
            kept = [group for group in kept if group.prompt.prompt_id in chosen]
            if self.queues.world.is_main:  # ranks' figures are added up
                row |= look_at_kept(step, rounds, len(chosen), num_prompts, len(ids) - len(chosen), dropped)
        return kept, scored, row

    def _next_prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a rollout of `step`; with environments a phase, since their `reset` may take long."""
        if self.environments is None:
            return self.carried.next_prompts(count)
        with self.metrics.phase("reset"), self.shutdown.unwatched("the openings of environments"):
            prompts = self.carried.next_prompts(count)
            if self.pre_rollouts is not None:
                self.pre_rollouts.look_ahead(step)
            return prompts

    def take_stats(self) -> EngineStats:
        """The engine's counters of the step's rollouts. Resets them."""
        return self.backend.take_stats() if self.pre_rollouts is None else self.pre_rollouts.take_stats()

    def release(self) -> None:
        """Frees the engine's weights until the next weight sync."""
        self.backend.release_weights()

    def _rollout(self, step: int, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        """Groups of `step` that this rank generated, of new `prompts` and carried ones.

        Raises GracefulExit if a signal cut any rank's rollout short.
        """
        pre_rollouts = self.pre_rollouts
        pre_roll = None if pre_rollouts is None else pre_rollouts.open(step)
        self.idle_window.begin()
        with self.metrics.phase("rollout"):
            groups, is_cut_short = self._generate(prompts)
        with self.metrics.phase("idle"):
            # Until every replica is done. An engine that a signal has interrupted may be dead.
            report = self.idle_window.run(self.drafter.train_step, None if is_cut_short else pre_roll)
            dropped = 0 if pre_rollouts is None else pre_rollouts.exchange()
        self.metrics.end_window(report, dropped)
        self.shutdown.sync("rollout", is_cut_short)
        return groups

    def _generate(self, prompts: Sequence[Prompt]) -> tuple[list[SampleGroup], bool]:
        """Groups of samples of those prompts that this replica fetches, without rewards; collects hidden states.
        Carried groups come first, since some of their responses are long, then new `prompts`.

        Returns when this replica has no request left and no prompt is left to fetch; True: a signal ended the rollout
        before its last response. Ranks of one engine have the same samples: its first one returns them.
        """
        num_samples = self.config.rollout.samples_per_prompt
        begun, waiting = self.carried.responses()
        first = [group.prompt for group in self.carried.groups]
        queue = self.queues.open([*first, *self.backend.ordered(prompts)], num_samples)
        with open_turns(self.environments) as turns, self.drafter.collecting(self.backend):
            params, have = step_params(self.config), waiting.keys()
            drafts = {} if self.pre_rollouts is None else self.pre_rollouts.take(prompts)
            call = GenerateCall(queue, params, num_samples, self._report, have, begun=begun, turns=turns, drafts=drafts)
            if turns is not None and not self.config.rollout.releases_cache(self.queues.world.device.type):
                call = replace(call, while_parked=self._train_drafter)  # else training takes the cache's memory
            samples, is_cut_short = self.shutdown.interruptible(self.rollout_cache.generate, call)
        if samples:
            self._lengths = np.sort(np.array([len(s.token_ids) for s in samples], np.float64))
        if not self.queues.is_first:
            return [], is_cut_short
        fetched = {prompt.prompt_id for prompt in queue.fetched}
        samples = [*samples, *(sample.unpacked() for sample in waiting.values() if sample.prompt_id in fetched)]
        return group_samples(queue.fetched, samples), is_cut_short

    def _train_drafter(self, seconds: float) -> bool:
        """A micro-step of the drafter where all requests have waited `seconds` for their environments; see
        `GenerateCall.while_parked`.
        """
        return self.idle_window.train_while_parked(self.drafter.train_step, seconds)

    def _report(self, running: int, waiting: int, generated_tokens: int) -> None:
        """The replica's progress, to watchdog and display, with an estimate of the tokens left."""
        lengths = self.backend.running_lengths()
        left = tokens_left(lengths, waiting, self._lengths)
        longest = int(lengths.max(initial=0))
        self.queues.world.heartbeat(state="BUSY", running=running, queued=waiting, longest=longest, left=left)
        self.metrics.on_rollout(running, waiting, generated_tokens)

    def close(self) -> None:
        """Ends engine and workers of rewards and environments, frees the idle windows' communicator. Collective."""
        self.idle_window.coordinator.close()
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()
        self.backend.close()


def score(world: World, rewards: RewardPool, groups: Sequence[SampleGroup]) -> str | None:
    """Sets the rewards of this rank's groups; returns a warning of failures. Collective; waits for ranks that score
    long, while others have nothing to score.

    Raises UnjudgedError, on every rank, where the workers of one cannot be started.
    """
    failures = lost = None
    try:
        failures = rewards.score(groups)
    except RewardError as error:
        lost = str(error)
    world.wait_for_all()
    if why := next(filter(None, world.all_gather_object(lost)), None):
        raise UnjudgedError(why)
    return failures


def judged_of(groups: Sequence[SampleGroup]) -> tuple[int, str | None]:
    """How many responses the reward functions judged, and why they failed on one of the others."""
    failures = [reward.failure for group in groups for reward in group.rewards]
    return failures.count(None), next((why for why in failures if why is not None), None)


def _forget_experts(groups: Sequence[SampleGroup]) -> None:
    """Frees what only the update reads of dropped groups, which stay for logs until the step ends: up to gigabytes."""
    for group in groups:
        for sample in group.samples:
            sample.routed_experts = None


def why_unjudged(everywhere: Sequence[tuple[int, str | None]]) -> str | None:
    """Why no response of any rank was judged, so that an update would learn nothing; None where one was."""
    why = next((why for _, why in everywhere if why is not None), None)
    if why is None or any(judged for judged, _ in everywhere):
        return None
    return f"no response of this rollout has a reward; one of the failures: {why}"

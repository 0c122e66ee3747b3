"""The RL loop: the page to read first.

The same text runs on every rank (SPMD under mpiexec or srun); there is no controller process. One step:

    prompts -> rollout -> idle window (trains the drafter) -> score        again where dynamic sampling drops groups
    -> exchange -> policy update -> merge drafters -> push weights -> log -> evaluate -> checkpoint

Ranks wait for each other in the idle window, by polling, and in the collectives of the phases after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import RewardError
from megatron_tlt.resilience.shutdown import GracefulExit
from megatron_tlt.trainer.batch_assembly import share_responses
from megatron_tlt.trainer.evaluation import EvalResult
from megatron_tlt.trainer.metrics import combined, window_metrics
from megatron_tlt.types import SampleGroup, TrainBatch, TrainOutput

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.idle.window import IdleWindow
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.resilience.nonfinite import NonFiniteGuard
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.rewards.pool import RewardPool
    from megatron_tlt.sync.push import BucketedSync
    from megatron_tlt.trainer.batch_assembly import BatchAssembler
    from megatron_tlt.trainer.evaluation import Evaluator
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.trainer.rollout_phase import RolloutPhase
    from megatron_tlt.types import Prompt


@dataclass
class Progress:
    """What a checkpoint keeps of the loop besides policy, optimizer and schedule."""

    step: int = 0  # steps done
    evaluations: list[EvalResult] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RLTrainer:
    """One rank of an RL run. Built by `setup.build_trainer`; owns its parts and closes them."""

    config: Config
    world: World
    prompts: PromptStream
    backend: RolloutBackend
    rollout: RolloutPhase
    idle_window: IdleWindow
    drafter: OnlineDrafterController
    rewards: RewardPool
    algorithm: Algorithm
    assembler: BatchAssembler
    policy: MegatronPolicy
    sync: BucketedSync
    evaluator: Evaluator | None
    checkpoints: CheckpointManager
    metrics: RunMetrics
    rollout_cache: RolloutCache
    nonfinite: NonFiniteGuard
    shutdown: GracefulShutdown
    progress: Progress = field(default_factory=Progress)
    _before: dict[str, Any] | None = None  # the state before the step under way
    _windows: list[dict[str, float]] = field(default_factory=list)  # metrics of its idle windows

    def run(self) -> bool:
        """Trains to `train.num_steps`; True if a signal ended it before, saved. Collective."""
        self._resume()
        if self._is_complete():
            self.metrics.note(
                f"nothing to do: {self.config.train.run_dir} is already at step {self.progress.step} of "
                f"train.num_steps = {self.config.train.num_steps} (another train.run_dir starts a new run)"
            )
            return False
        try:
            self.shutdown.sync_after_step()  # a signal may have come while everything was loaded
            self._push_weights()
            self._maybe_evaluate()
            while self.progress.step < self.config.train.num_steps:
                self._train_step()
        except GracefulExit as reason:
            if not self._is_complete():
                self._save_and_leave(reason)
                return True
        self._save_last()
        self.rollout_cache.clear()
        self.metrics.finish(self.progress.evaluations, self.checkpoints.latest())
        return False

    # -- one step ---------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        """One RL step. A signal before the update drops it; after that it is finished."""
        started = time.perf_counter()
        self._before = self._state()
        self._windows.clear()
        groups = self._sample_groups()
        stats, mine = self.backend.take_stats(), self.rollout_cache.end_step()
        with self._phase("exchange"):
            table, sequences = self.assembler.exchange(groups)
        with self._phase("logprobs"):
            batch = self.assembler.build_batch(sequences, table)
        self.shutdown.sync("update")
        out = self._update_policy(batch)
        metrics = {**batch.metrics, **out.metrics, **table.metrics()}
        metrics |= self.nonfinite.look(self.progress.step + 1, batch, out)
        metrics |= self._merge_drafters()
        metrics |= self._push_weights()
        self.progress.step += 1
        self._before = None
        with self._phase("log"):
            mine |= combined(self._windows) | self.drafter.buffer_metrics()
            seconds = time.perf_counter() - started
            self.metrics.log(self.progress.step, seconds, metrics, stats, groups, mine)
        # Saved last: a resumed run must find the metrics and the evaluation of the step it resumes after.
        self._maybe_evaluate()
        self._maybe_save()
        self.nonfinite.check()
        self.shutdown.sync_after_step()

    def _sample_groups(self) -> list[SampleGroup]:
        """This rank's scored groups of one step; further rounds where dynamic sampling drops groups. Collective."""
        section, num_prompts = self.config.algorithm, self.config.train.prompts_per_step
        kept: list[SampleGroup] = []
        self.drafter.begin_step(self.backend.policy_version)
        self.rollout_cache.begin_step(self.progress.step + 1, self.backend.policy_version)
        for _ in range(section.max_sampling_rounds if section.dynamic_sampling else 1):
            prompts = self.prompts.next_batch(num_prompts)
            scored = self._rollout(prompts)
            with self._phase("score"):
                self.rewards.score(scored)
                share_responses(self.world, self.backend, scored)
                kept += [g for g in scored if self.algorithm.keep_group(self.algorithm.shaped(g))]
                everywhere = self.world.all_gather_object((_ids(kept), _verdicts(scored)))
                ids = sorted(prompt_id for of_rank, _ in everywhere for prompt_id in of_rank)
                _check_verdicts([verdicts for _, verdicts in everywhere])
            if len(ids) >= num_prompts:
                break
        chosen = set(ids[:num_prompts])
        return [g for g in kept if g.prompt.prompt_id in chosen]

    def _rollout(self, prompts: list[Prompt]) -> list[SampleGroup]:
        """Groups that this rank generated. Raises GracefulExit if a signal cut any rank's rollout short."""
        self.idle_window.begin()
        with self._phase("rollout"):
            groups = self.rollout.generate(prompts)  # returns when this replica has no request left
        with self._phase("idle"):
            report = self.idle_window.run(self.drafter.train_step)  # until every replica is done
        self._windows.append(window_metrics(report, self.rollout.queues.is_first))
        self.shutdown.sync("rollout", self.rollout.is_cut_short)
        return groups

    def _update_policy(self, batch: TrainBatch) -> TrainOutput:
        with self._phase("update"):
            if not any(batch.denominators):  # dynamic sampling kept no group
                return TrainOutput(self.policy.policy_version, {"empty_step": 1.0}, skipped=True)
            return self.policy.train_step(batch)

    def _merge_drafters(self) -> dict[str, float]:
        with self._phase("merge"):
            metrics = self.drafter.merge()
            if self.drafter.disabled_reason is not None:
                self.idle_window.disable(self.drafter.disabled_reason)
        return metrics

    def _push_weights(self) -> dict[str, float]:
        """The policy, and the drafter if a merge has changed it, into every engine: both or none. Returns metrics."""
        with self._phase("weight_sync"):
            version, drafter = self.policy.policy_version, self.drafter.unpublished()
            weights = self.rollout_cache.fingerprint(self.policy.named_weights())  # read on its way to the engine
            metrics = self.sync.push(weights, version, drafter)
            if drafter is not None:
                self.drafter.mark_published(drafter[1])
        return metrics

    def _maybe_save(self) -> None:
        with self._phase("checkpoint"):
            # Weights that may be broken must not push good ones out, and those of no update cannot be loaded again.
            is_good = not self.nonfinite.in_a_row and self.policy.has_stepped
            self.checkpoints.maybe_save(self.progress.step, self._state, self.drafter.state_dict, is_good)
            self.rollout_cache.remove_until(self.checkpoints.newest)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Marks the phase for error messages (`World.enter`) and in the event log."""
        self.world.enter(name, self.progress.step)
        with self.metrics.span(name, self.progress.step):
            yield

    # -- evaluation -------------------------------------------------------------------------------------------

    def _maybe_evaluate(self) -> None:
        """Evaluates before the first step, every `eval.every` steps and after the last, once each."""
        if self.evaluator is None or not self._is_evaluation_due():
            return
        with self._phase("eval"):
            result = self.evaluator.run(self.progress.step, self.shutdown)
        self.backend.take_stats()  # what evaluation generated is not counted as rollout
        self.progress.evaluations.append(result)
        self.metrics.log_eval(result)

    def _is_evaluation_due(self) -> bool:
        step, every, done = self.progress.step, self.config.eval.every, self.progress.evaluations
        is_scheduled = bool(every) and (step % every == 0 or step == self.config.train.num_steps)
        return self.evaluator is not None and is_scheduled and not (done and done[-1].step == step)

    # -- begin and end ----------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return self.progress.step >= self.config.train.num_steps and not self._is_evaluation_due()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "prompts": self.prompts.state_dict(),
            "evaluations": [asdict(e) for e in self.progress.evaluations],
            "engine": self.backend.state_dict(),
        }

    def _resume(self) -> None:
        state = self.checkpoints.load_latest()
        self.rollout_cache.start(0 if state is None else state["step"])
        if state is not None:
            self.prompts.load_state_dict(state["prompts"])
            self.backend.load_state_dict(state.get("engine", {}))
            self.drafter.load_state_dict(self.checkpoints.load_drafter())
            evaluations = [EvalResult(**e) for e in state["evaluations"]]
            self.progress = Progress(state["step"], evaluations)
        self.metrics.start(self.progress.step)

    def _save_and_leave(self, reason: GracefulExit) -> None:
        """A checkpoint of the last finished step; the unfinished one leaves no trace in it. Collective."""
        step, why = self.progress.step, f"{self.shutdown.reason()}: {reason}; "
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
        with self._phase("checkpoint"):
            self.checkpoints.save_now(step, self._before or self._state(), self.drafter.state_dict)
        self.metrics.note(f"{why}saved after step {step}, the next start goes on there")
        self.world.ends_early(True, f"{ended}; saved, the same command goes on")

    def _save_last(self) -> None:
        """After the last step: saves it, also where the last save was put off. Collective."""
        with self._phase("checkpoint"):
            if self.config.checkpoint.every and self.policy.has_stepped:
                # After an update that was skipped the weights are those before it; older checkpoints stay beside it.
                is_good, step = not self.nonfinite.in_a_row, self.progress.step
                self.checkpoints.save_now(step, self._state(), self.drafter.state_dict, prune=is_good)
            self.checkpoints.wait()

    def close(self) -> None:
        """Frees engine, reward workers, communicators and log files. Collective."""
        self.shutdown.close()
        self.rollout_cache.close()
        self.idle_window.coordinator.close()
        self.backend.close()
        self.rewards.close()
        self.metrics.close()
        self.checkpoints.close()  # last: from here on another job may use the run directory


def _ids(groups: list[SampleGroup]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


def _verdicts(groups: list[SampleGroup]) -> tuple[int, str | None]:
    """How many responses the reward functions judged, and why one of the others was not."""
    failures = [reward.failure for group in groups for reward in group.rewards]
    return failures.count(None), next((why for why in failures if why is not None), None)


def _check_verdicts(everywhere: list[tuple[int, str | None]]) -> None:
    """Raises RewardError on every rank if no response of any rank was judged: nothing can be learned from them."""
    why = next((why for _, why in everywhere if why is not None), None)
    if why is not None and not any(judged for judged, _ in everywhere):
        raise RewardError(f"the reward functions failed on every response of this rollout; one of them: {why}")

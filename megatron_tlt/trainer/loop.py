"""The RL loop: the page to read first.

The same text runs on every rank (SPMD under mpiexec or srun); there is no controller process. Each step:
roll out my share of the prompts, train the drafter until the slowest rank is done (the *idle* time),
score, exchange sequences, update the policy, merge the ranks' drafters, push both into the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.distributed.dims import rollout_replica
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown
from megatron_tlt.trainer.batch_assembly import BatchAssembler, group_samples, share_answers
from megatron_tlt.trainer.evaluation import EvalResult
from megatron_tlt.types import SampleGroup, TrainBatch, TrainOutput

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.controller import OnlineDrafterController
    from megatron_tlt.idle.stolen_requests import RequestStealing
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.resilience.rollout_cache import NoRolloutCache, RolloutCache
    from megatron_tlt.rewards.pool import RewardPool
    from megatron_tlt.trainer.batch_assembly import StepTable
    from megatron_tlt.trainer.evaluation import Evaluator
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.types import Prompt, Sample, TrainSequence


@dataclass
class Progress:
    """What a checkpoint keeps of the loop besides policy, optimizer and schedule."""

    step: int = 0  # steps done
    evaluations: list[EvalResult] = field(default_factory=list)


class RLTrainer:
    """One rank of an RL run. Built by `build.build_trainer`; owns its parts and closes them."""

    def __init__(  # noqa: PLR0913  a part a line
        self,
        config: Config,
        world: World,
        *,
        prompts: PromptStream,
        rewards: RewardPool,
        algorithm: Algorithm,
        policy: MegatronPolicy,
        backend: RolloutBackend,
        upkeep: OnlineDrafterController,
        evaluator: Evaluator | None,
        checkpoints: CheckpointManager,
        metrics: RunMetrics,
        rollout_cache: RolloutCache | NoRolloutCache,
        stop: GracefulShutdown | None = None,
        takeover: RequestStealing | None = None,
    ):
        """`takeover`: replicas answer each other's queued requests."""
        self.takeover = takeover
        self.config, self.world, self.rollout_cache = config, world, rollout_cache
        self.prompts, self.rewards, self.algorithm = prompts, rewards, algorithm
        self.policy, self.backend, self.upkeep = policy, backend, upkeep
        self.evaluator, self.checkpoints, self.metrics = evaluator, checkpoints, metrics
        self.assembler = BatchAssembler(world, policy.dims, algorithm, config.rollout.temperature)
        self.replica, self.tp_rank = rollout_replica(world.rank, config.rollout.tp)
        self.num_replicas = world.size // config.rollout.tp
        self.nonfinite = NonFiniteGuard(
            config.train.max_nonfinite_steps, Path(config.train.run_dir), world, policy.dims
        )
        self.stop = stop if stop is not None else GracefulShutdown(world, config.stop)
        self.progress = Progress()
        self._before: dict[str, Any] | None = None  # the state before the step under way

    def run(self) -> bool:
        """Trains to `train.num_steps`; True if a signal ended it before, saved. Collective."""
        self._resume()
        if self.progress.step >= self.config.train.num_steps and not self._evaluation_due():
            self.metrics.note(
                f"nothing to do: {self.config.train.run_dir} is already at step {self.progress.step} of "
                f"train.num_steps = {self.config.train.num_steps} (another train.run_dir starts a new run)"
            )
            return False
        try:
            self.stop.sync_after_step()  # one may have come while everything was loaded
            with self._phase("push"):
                self.upkeep.push(self.policy, self.rollout_cache.fingerprint)
            self._evaluate()
            while self.progress.step < self.config.train.num_steps:
                self._train_one()
        except GracefulExit as leaving:
            if self.progress.step < self.config.train.num_steps or self._evaluation_due():
                self._save_and_leave(leaving)
                return True
        self._save_last()
        self.rollout_cache.clear()
        self.metrics.finish(self.progress.evaluations, self.checkpoints.latest())
        return False

    def _train_one(self) -> None:
        started = time.perf_counter()
        self._before = self._state()
        groups, table = self._rollout()
        stats, cached = self.backend.take_stats(), self.rollout_cache.end_step()
        with self._phase("exchange"):
            parts = self.assembler.exchange(groups, table)
        with self._phase("logprobs"):
            self._score_answers(parts)
            batch = self.assembler.finish(parts, table, self._reward_kl(parts))
        self.stop.sync("update")  # past this, the step is finished
        with self._phase("update"):
            out = self._update(batch)
            skips = self.nonfinite.look(self.progress.step + 1, batch, out)
        with self._phase("merge"):
            merged = self.upkeep.merge()
        with self._phase("push"):
            pushed = self.upkeep.push(self.policy, self.rollout_cache.fingerprint)
        self.progress.step += 1
        self._before = None
        with self._phase("log"):
            metrics = {**batch.metrics, **out.metrics, **skips, **merged, **pushed, **table_metrics(table)}
            seconds = time.perf_counter() - started
            figures = {**self.upkeep.take_figures(), **cached}
            if self.takeover is not None:
                figures["idle/stolen_requests"] = self.takeover.take_count()
            self.metrics.log(self.progress.step, seconds, metrics, stats, groups, figures)
        # Saved last: a resumed run must find the metrics and the evaluation of the step it resumes after.
        self._evaluate()
        with self._phase("checkpoint"):
            # Weights that may be broken must not push good ones out, and those of no update cannot be loaded again.
            good = not self.nonfinite.in_a_row and self.policy.has_stepped
            self.checkpoints.maybe_save(self.progress.step, self._state, self.upkeep.drafter_state, good)
            self.rollout_cache.remove_until(self.checkpoints.newest)
        self.nonfinite.check()
        self.stop.sync_after_step()

    def _save_and_leave(self, leaving: GracefulExit) -> None:
        """A checkpoint of the last finished step; the unfinished one leaves no trace in it. Collective."""
        step, told = self.progress.step, f"{self.stop.reason()}: {leaving}; "
        ended = f"ended by a signal after step {step} of {self.config.train.num_steps}"
        if not self.policy.has_stepped:  # such a checkpoint could not be loaded again
            self.metrics.note(f"{told}there was no update yet, the next start begins anew")
            self.world.ends_early(False, f"{ended}, before the first update; the same command begins anew")
            return
        if self._before is not None:
            self.upkeep.drop_window()
        if self.nonfinite.in_a_row:
            self.checkpoints.wait()
            self.metrics.note(
                f"{told}not saved, for updates were not finite; the next start goes on before them"
            )
            self.world.ends_early(False, f"{ended}, not saved; the same command goes on before it")
            return
        with self._phase("checkpoint"):
            self.checkpoints.save_now(step, self._before or self._state(), self.upkeep.drafter_state)
        self.metrics.note(f"{told}saved after step {step}, the next start goes on there")
        self.world.ends_early(True, f"{ended}; saved, the same command goes on")

    def _save_last(self) -> None:
        """The run has done its last step: nothing that was owed is lost. Collective."""
        with self._phase("checkpoint"):
            if self.config.checkpoint.every and self.policy.has_stepped:
                # After an update that was skipped the weights are those before it; older checkpoints stay beside it.
                state, drafter = self._state(), self.upkeep.drafter_state
                self.checkpoints.save_now(
                    self.progress.step, state, drafter, prune=not self.nonfinite.in_a_row
                )
            self.checkpoints.wait()

    def _rollout(self) -> tuple[list[SampleGroup], StepTable]:
        """Answers and verdicts for one step; more rounds where dynamic sampling drops groups."""
        kept: list[SampleGroup] = []
        wanted = self.config.train.prompts_per_step
        rounds = self.config.algorithm.max_sampling_rounds if self.config.algorithm.dynamic_sampling else 1
        self.upkeep.begin_step(self.backend.policy_version)
        self.rollout_cache.begin_step(self.progress.step + 1, self.backend.policy_version)
        for _ in range(rounds):
            asked = self.prompts.next_batch(wanted)
            prompts = asked[self.replica :: self.num_replicas]
            with self._holding():
                with self._phase("rollout"), self.upkeep.rollout(self.metrics.on_rollout) as on_progress:
                    generate = partial(self.rollout_cache.generate, prompts)
                    samples, dropped = self.stop.interruptible(generate, on_progress)
                if self.takeover is not None and not dropped:
                    dropped = self._help(self.takeover, asked, samples)
            with self._phase("idle"):
                self.upkeep.wait(samples)
            self.stop.sync("rollout", dropped)
            if self.takeover is not None:
                home = {prompt.prompt_id: i % self.num_replicas for i, prompt in enumerate(asked)}
                samples = self.takeover.bring_home(samples, home)
            with self._phase("score"):
                scored = self._score(prompts, samples)
                share_answers(self.world, self.backend, scored)
                kept += [g for g in scored if self.algorithm.keep_group(self.algorithm.shaped(g))]
                ids = sorted(
                    i
                    for part in self.world.all_gather_object([g.prompt.prompt_id for g in kept])
                    for i in part
                )
            if len(ids) >= wanted:
                break
        chosen = set(ids[:wanted])
        with self._phase("exchange"):
            groups = [g for g in kept if g.prompt.prompt_id in chosen]
            return groups, self.assembler.collect(groups)

    def _help(self, takeover: RequestStealing, asked: Sequence[Prompt], samples: list[Sample]) -> bool:
        """Answers what busy replicas have queued, as long as one has; True if a signal cut it short.

        `asked` are the prompts of all replicas. Adds to `samples`. For the world's board all of this is the rollout:
        there phases are counted, and every rank goes through as many.
        """
        prompts = {prompt.prompt_id: prompt for prompt in asked}
        dropped = False
        while not dropped:
            with self.metrics.span("idle", self.progress.step):
                pieces = self.upkeep.take_over()
            if not pieces:
                break
            keep = self.rollout_cache.writer_for([prompts[piece.prompt_id] for piece in pieces])
            answer = partial(takeover.answer, prompts, pieces, keep)
            rollout = self.metrics.span("rollout", self.progress.step)
            with rollout, self.upkeep.helping(self.metrics.on_rollout) as on_progress:
                taken, dropped = self.stop.interruptible(answer, on_progress)
            samples += taken
        return dropped

    def _holding(self) -> AbstractContextManager[None]:
        """The engine's cache stays between the rollouts of one step."""
        return nullcontext() if self.takeover is None else self.takeover.holding()

    def _score(self, prompts: list[Prompt], samples: list[Sample]) -> list[SampleGroup]:
        """Judged groups. Ranks of one engine hold the same samples: its first one scores them."""
        if self.tp_rank:
            return []
        groups = group_samples(prompts, samples)
        self.rewards.score(groups)
        return groups

    def _score_answers(self, parts: list[list[TrainSequence]]) -> None:
        """The policy's log-probs in place of the engine's, of an engine that has none. Mutates the sequences."""
        if self.backend.capabilities.logprobs:
            return
        flat = [sequence for part in parts for sequence in part]
        scores = self.policy.logprobs(flat, self.config.rollout.temperature, which="policy")
        for sequence, logprobs in zip(flat, scores, strict=True):
            sequence.rollout_logprobs = np.asarray(logprobs, dtype=np.float32)

    def _reward_kl(self, parts: list[list[TrainSequence]]) -> list[np.ndarray] | None:
        """Per-token KL to the reference where it is part of the reward; None otherwise."""
        if not self.algorithm.needs_token_kl:
            return None
        flat = [sequence for part in parts for sequence in part]
        temperature = self.config.rollout.temperature
        mine = self.policy.logprobs(flat, temperature, which="policy")
        frozen = self.policy.logprobs(flat, temperature, which="reference")
        return [a - b for a, b in zip(mine, frozen, strict=True)]  # k1, the estimator for KL in the reward

    def _update(self, batch: TrainBatch) -> TrainOutput:
        if not any(batch.denominators):  # dynamic sampling found nothing to learn from
            return TrainOutput(self.policy.policy_version, {"empty_step": 1.0}, skipped=True)
        return self.policy.train_step(batch)

    def _evaluate(self) -> None:
        """Evaluates before the first step, every `eval.every` steps and after the last, once each."""
        if self.evaluator is None or not self._evaluation_due():
            return
        step, done = self.progress.step, self.progress.evaluations
        with self._phase("eval"):
            result = self.evaluator.run(step, self.stop)
        self.backend.take_stats()  # what evaluation generated is not counted as rollout
        done.append(result)
        self.metrics.log_eval(result)

    def _evaluation_due(self) -> bool:
        step, every, done = self.progress.step, self.config.eval.every, self.progress.evaluations
        skipped = not every or (step % every and step != self.config.train.num_steps)
        return self.evaluator is not None and not skipped and not (done and done[-1].step == step)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "prompts": self.prompts.state_dict(),
            "evaluations": [e.to_json() for e in self.progress.evaluations],
            "engine": self.backend.state_dict(),
            "upkeep": self.upkeep.state_dict(),
        }

    def _resume(self) -> None:
        state = self.checkpoints.load_latest()
        self.rollout_cache.start(0 if state is None else state["step"])
        if state is None:
            self.metrics.start(0)
            return
        self.prompts.load_state_dict(state["prompts"])
        self.backend.load_state_dict(state.get("engine", {}))
        self.upkeep.load_state_dict(state.get("upkeep", {}), self.checkpoints.load_drafter())
        self.progress = Progress(state["step"], [EvalResult.from_json(e) for e in state["evaluations"]])
        self.metrics.start(self.progress.step)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Marks the phase on the world's board (for error messages) and in the event log (for people)."""
        self.world.enter(name, self.progress.step)
        with self.metrics.span(name, self.progress.step):
            yield

    def close(self) -> None:
        """Frees engine, reward workers, communicators and log files. Collective."""
        self.stop.close()
        self.rollout_cache.close()
        self.upkeep.close()
        self.backend.close()
        self.rewards.close()
        self.metrics.close()
        self.checkpoints.close()  # last: from here on another job may use the run directory


def table_metrics(table: StepTable) -> dict[str, float]:
    """Reward, accuracy and length statistics of one step over all ranks."""
    rewards = table.rewards
    if not len(rewards.reward):
        return {"rollout/samples": 0.0}
    length = rewards.length
    return {
        "rollout/samples": float(len(length)),
        "reward/accuracy": float(rewards.correct.mean()),
        "reward/failures": float(table.failures),
        "length/mean": float(length.mean()),
        "length/median": float(np.median(length)),
        "length/p95": float(np.quantile(length, 0.95)),
        "length/max": float(length.max()),
        "length/truncated": float(rewards.truncated.mean()),
    }

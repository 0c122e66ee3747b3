"""The RL loop: the page to read first.

The same text runs on every rank (SPMD under mpiexec or srun); there is no controller process. One step:

    sample groups (rollout, idle window that pre-rolls and trains the drafter, score) -> exchange -> log-probs
    -> policy update -> merge drafters -> weight sync -> log -> evaluate -> checkpoint

Ranks wait for each other in the idle window, by polling, and in the collectives of the phases after it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.trainer.empty_steps import EmptySteps
from megatron_tlt.trainer.job import Job, State

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.training.run_drafter import RunDrafter
    from megatron_tlt.resilience.nonfinite import NonFiniteGuard
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.sync.push import BucketedSync
    from megatron_tlt.trainer.batch_assembly import BatchAssembler, StepTable
    from megatron_tlt.trainer.evaluation import Evaluator
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.trainer.recovery import Recovery, TrainState
    from megatron_tlt.trainer.sampling import GroupSampler
    from megatron_tlt.types import TrainBatch


@dataclass(kw_only=True, eq=False)
class RLTrainer(Job):
    """One rank of an RL run. Built by `setup.build_trainer`; owns its parts and closes them."""

    config: Config
    world: World
    state: TrainState
    sampler: GroupSampler
    assembler: BatchAssembler
    policy: MegatronPolicy
    drafter: RunDrafter
    sync: BucketedSync
    evaluator: Evaluator | None
    recovery: Recovery
    metrics: RunMetrics
    checkpoints: CheckpointManager
    rollout_cache: RolloutCache
    nonfinite: NonFiniteGuard
    shutdown: GracefulShutdown

    def __post_init__(self) -> None:
        self.num_steps = self.config.train.num_steps
        self.empty_steps = EmptySteps(self.config, self.state, self.world.is_main)

    def run(self) -> bool:
        try:
            return super().run()
        finally:
            self.metrics.close_display()  # an error's text must not stand behind the live line

    def begin(self) -> bool:
        """The first weight sync and evaluation; see `Job.begin`."""
        if self.is_complete():  # rows of later steps stay, where it goes on from an earlier one
            self.note(
                f"nothing to do: {self.config.train.run_dir} is already at step {self.state.step} of "
                f"train.num_steps = {self.num_steps} (a larger one goes on, another train.run_dir starts anew)"
            )
            return False
        self.metrics.start()
        if not self.done and self.rollout_cache.has_old_steps:
            self.note("no checkpoint yet: begins at step 1, with the responses of the rollout cache")
        self._collect_hidden_states()
        self.shutdown.sync_after_step()  # a signal may have come while everything was loaded
        self._sync_weights()
        if self._maybe_evaluate():
            # A signal had dropped this evaluation; a checkpoint that is not this run's newest stays as it is.
            self.checkpoints.is_behind = self.checkpoints.newest == self.done
            self.shutdown.sync_after_step()
        return True

    def step(self) -> None:
        """One RL step. A signal before the update drops it; after that it is finished."""
        step = self.done + 1
        self.metrics.begin_step()
        self.recovery.begin_step()
        self.rollout_cache.begin_step(step, self.policy.policy_version, self.sync.fingerprint())
        groups, scored, of_rank = self.sampler.sample(step)  # rollout, idle window, score
        stats = self.sampler.take_stats()
        self.sampler.release()  # until the weight sync
        with self.metrics.phase("exchange"):
            table, sequences = self.assembler.exchange(groups, scored)
        with self.metrics.phase("logprobs"):
            batch = self.assembler.build_batch(sequences, table)
        self.shutdown.sync("update")  # the last place where a signal drops the step
        with self.metrics.phase("update"):
            updated = self._update(batch, table)
        with self.metrics.phase("merge"):
            merged = self.drafter.merge(at_once=self.checkpoints.is_scheduled(step))
        pushed = self._sync_weights()
        self.recovery.step_done()
        self.shutdown.step_done()
        with self.metrics.phase("log"):
            row = {**batch.metrics, **updated, **table.metrics(), **merged, **pushed}
            self.metrics.log(row, stats, groups, scored, of_rank | self.drafter.buffer_metrics())
        # Before it is saved: a resumed run must find the metrics and the evaluation of the step it resumes after.
        self._maybe_evaluate()

    def _update(self, batch: TrainBatch, table: StepTable) -> dict[str, float]:
        """Updates the policy. Returns metrics."""
        out = self.policy.train_step(batch)
        nonfinite = self.nonfinite.look(self.done + 1, batch, out)
        return out.metrics | nonfinite | self.empty_steps.look(self.done + 1, table, out)

    def _sync_weights(self) -> dict[str, float]:
        """The policy, and the drafter if a merge has changed it, into every engine: both or none. Returns metrics."""
        with self.metrics.phase("weight_sync"):
            drafter = self.drafter.unpublished()
            metrics = self.sync.push(self.policy.named_weights(), self.policy.policy_version, drafter)
            if drafter is not None:
                self.drafter.mark_published(drafter[1])
        return metrics

    def _collect_hidden_states(self) -> None:
        """For engines that give no hidden states: the drafter trains on those of the policy's own forward pass.

        The log-prob pass or the update of a step hands them to the drafter, which trains in the next step's windows.
        """
        layers = self.drafter.actor_layers
        if layers is not None:
            section = self.config.drafter
            budget = int(section.sizes(self.world.device.type).buffer_mib * 2**20)
            dtype = DTYPES[self.config.rollout.dtype]
            self.policy.collect_hidden_states(self.drafter.take_step, budget, dtype, layers, self.config.train.seed)

    def _maybe_evaluate(self) -> bool:
        """Evaluates before the first step, every `eval.every` steps and after the last, once each; whether it has."""
        if self.evaluator is None or not self._is_evaluation_due():
            return False
        began = time.perf_counter()
        with self.metrics.phase("eval"):
            result = self.evaluator.run(self.state.step, self.shutdown)
        self.sampler.take_stats()  # tokens of the evaluation are not counted as rollout
        self.state.evaluations.append(result)
        self.metrics.log_eval(result, time.perf_counter() - began)
        return True

    def _is_evaluation_due(self) -> bool:
        step, every, done = self.state.step, self.config.eval.every, self.state.evaluations
        is_scheduled = bool(every) and (step % every == 0 or step == self.num_steps)
        return self.evaluator is not None and is_scheduled and not (done and done[-1].step == step)

    def finish(self) -> None:
        """The last checkpoint, also where its save was put off, and the final tables."""
        with self.phase("checkpoint"):
            if self.policy.has_stepped:
                # After an update that was skipped the weights are those before it; older checkpoints stay beside it.
                self.checkpoints.save_now(self.done, self.state_dict, prune=self.unsaved() is None)
            else:
                self.note(f"no checkpoint of step {self.done}: {self.unsaved()}")
        self.rollout_cache.clear(self.done)
        self.metrics.finish(self.checkpoints.latest())

    def close(self) -> None:
        """Frees engine, reward workers, communicators and log files. Collective."""
        self.sampler.close()
        self.metrics.close()
        self.rollout_cache.close()
        super().close()

    # -- the rest of a job: its state, which `recovery` keeps, and its lines and phases --------------------

    @property
    def done(self) -> int:
        return self.state.step

    def is_complete(self) -> bool:
        return self.done >= self.num_steps and not self._is_evaluation_due()

    def load(self, state: State | None) -> None:
        if state is not None:
            self.recovery.load(state)
        self.rollout_cache.start(self.done)

    def state_dict(self) -> State:
        # Beside the state: the position on the learning-rate schedule is a count of mini-batches, its length another.
        counts = {"mini_batches": self.config.algorithm.mini_batches}
        return {**self.recovery.state_dict(), **counts, "total_optimizer_steps": self.config.optimizer_steps}

    def held_out_fingerprint(self) -> dict[str, str]:
        return {} if self.evaluator is None else {"data.eval": self.evaluator.fingerprint}

    def unsaved(self) -> str | None:
        if not self.policy.has_stepped:  # such a checkpoint could not be loaded again
            return "there was no update yet, the next start begins anew"
        return self.nonfinite.unsaved()

    def save_if_due(self) -> None:
        super().save_if_due()
        self.rollout_cache.remove_until(self.checkpoints.newest)
        self.empty_steps.check()
        self.nonfinite.check()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.metrics.phase(name)

    def note(self, text: str) -> None:
        self.metrics.note(text)

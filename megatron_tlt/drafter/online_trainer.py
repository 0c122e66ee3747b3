"""`OnlineDrafterTrainer`: trains the drafter on one rank while slower ranks roll out, and merges the ranks' drafters.

    begin_step(version, tables)            a rollout by this policy begins; hidden states come in by `buffer.add`
    train_step() train_step() ...          this rank alone, or with its tensor-parallel group; bounded by tokens
    merge(...)                             all ranks: one drafter again, or none if no rank trained
    weights()                              to the engines, behind the policy's own

A *window* is the time from one merge to the next, of one or several steps: a merge that would take more than
`drafter.online.merge_share` of the seconds trained in it is put off. Gradients exist in micro-steps only. Embedding and
LM head are those of the policy that rolls out, where its engine keeps them: responses of the versions before it are
read through them, too. Legend: R ranks, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.drafter.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafter.buffer import HiddenStateBuffer
from megatron_tlt.drafter.checkpoint import drafter_entries
from megatron_tlt.drafter.fp8 import use_fp8
from megatron_tlt.drafter.kinds.registry import KINDS
from megatron_tlt.drafter.trainer import DrafterTrainer, LearningRate
from megatron_tlt.drafter.training_state import MEAN, STATE_NAMES, TrainingState
from megatron_tlt.errors import CheckpointError, DrafterError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.drafters import DrafterModel
from megatron_tlt.types import HiddenStateSample

Tables = Callable[[], tuple[Tensor, Tensor]]  # the engine's embedding and LM head [V, H]

_MIB = 1 << 20
_WIDTH = 128  # hidden size up to which learning rates are taken as they are
_WARMUP = 10  # optimizer steps of linear warm-up, once in a run
_MEAN_DECAY = 0.97  # of the mean of the weights that engines draft with, a micro-step
_MEAN_START = 9  # the mean's decay is 0.1 after the first step of a run, 0.9 after 81: it forgets its start

# Policy versions by which hidden states may be older than the policy that rolls out, whose embedding and LM head read
# them all: at RL's learning rates eight updates hardly move these.
_MAX_AGE = 8


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The same on every rank."""

    tokens: tuple[int, ...]  # by rank, trained on since the last merge
    disabled: tuple[int, ...]  # ranks whose training had failed before
    rolled_back: bool  # a replica's drafter was not finite: training is over on all ranks
    coverage: float  # share of the tokens of the step's responses that are in the drafter's vocabulary


class OnlineDrafterTrainer:
    """One rank's drafter in training. Between merges replicas differ; the ranks of a tensor-parallel group never do.

    A rank that fails goes back to where the window began, contributes nothing, and trains no more.
    """

    def __init__(
        self,
        model: DrafterModel,
        section: DrafterSection,
        *,
        temperature: float = 1.0,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        from_actor: bool = False,
        fresh: bool = False,
        seed: int = 0,
    ):
        """`model` (all of it, no shard) has the starting drafter's weights in fp32; the trainer owns it, moves it to
        `device` in the type of `section` and replaces its linears for `section.online.fp8`: ConfigError where that is
        not available. `from_actor`: hidden states come in by `take_step`. `fresh`: the drafter is untrained. Its
        learning rate begins at `online.start_lr`; a reduced vocabulary is that of the first responses of all ranks, and
        training begins with the merge that has them. `seed`: of the order of the data.
        """
        online, self._device = section.online, torch.device(device)
        sizes = section.sizes(self._device.type)
        self.model, self._tp = model, tp or TensorParallel()
        self._tokens = sizes.micro_step_tokens
        self._draft_steps = section.online_draft_steps(KINDS[model.config.kind].facts)
        by_width = min(1.0, _WIDTH / model.config.policy.hidden_size)
        # Of a useless drafter, over lr.
        self._extra_lr = max(0.0, online.start_lr / online.lr - 1.0) if fresh else 0.0
        self._decay, self._merge_share = _MEAN_DECAY, online.merge_share
        window = min(section.max_sequence_tokens, sizes.micro_step_tokens)
        self.buffer = HiddenStateBuffer(int(sizes.buffer_mib * _MIB), window, _MAX_AGE, seed)
        self._read_tables: Tables | None = None  # None: no rollout has begun
        self.from_actor = from_actor
        start = {name: p.detach() for name, p in model.named_parameters()}
        model.to(self._device, DTYPES[sizes.dtype])
        precision = nullcontext if online.fp8 == "off" else use_fp8(model, self._device)
        self._vocabulary = dict(model.named_buffers())  # of a reduced one; never trained
        self._awaits_vocabulary = fresh and model.config.reduced
        self._state = TrainingState(model, start, self._tp)
        self._no_table = torch.empty(0, 0, device=self._device)
        self._trainer = DrafterTrainer(
            model,
            self._no_table,
            self._no_table,
            section.model_copy(update={"draft_steps": self._draft_steps}),
            temperature,
            precision=precision,
            state=self._state,
            rate=LearningRate(by_width * online.lr, _WARMUP),
        )
        self._before: tuple[int, int] | None = None  # steps where the window began, once the state changed
        self.version = 0  # merges that changed the drafter
        self.window_tokens = 0  # response tokens this rank has trained on since the last merge
        self.window_seconds = 0.0  # in micro-steps since the last merge
        self._has_tables = False  # whether the policy's tables are there: from a step's first micro-step on
        self.merge_seconds = 0.0  # of the last merge that changed the drafter; the exchange that follows is added to it
        self.failure: str | None = None  # why this rank trains no more

    @property
    def enabled(self) -> bool:
        """Whether this rank still trains."""
        return self.failure is None

    @property
    def trained_steps(self) -> int:
        """Optimizer steps behind the present weights: the most of any replica, summed over windows."""
        return self._trainer.trained_steps

    # -- a window -------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int, tables: Tables) -> None:
        """A rollout by `policy_version` begins: drops responses that are too old. `tables` reads embedding and LM head
        of the engine that rolls out, which stay as they are until the window ends; collective in a tensor-parallel
        group.
        """
        if not self.from_actor:
            self.buffer.begin_step(policy_version)
        self._read_tables = tables

    def take_step(self, samples: Sequence[HiddenStateSample], left_out: int) -> None:
        """Adds responses with hidden states that the actor handed out, on which the next step's windows train;
        `left_out` did not fit. A step begins in the buffer, with the policy that rolls out next.
        """
        if samples:
            self.buffer.begin_step(samples[0].trajectory.policy_version + 1)
        self.buffer.counters["dropped_by_budget"] += left_out
        for sample in samples:
            self.buffer.add(sample)

    def train_step(self) -> dict[str, float] | None:
        """One micro-step; None if there is nothing to train on. All ranks of a tensor-parallel group call it together.

        Raises DrafterError if the gradient is not finite, or memory ran out, on any rank of the group: the
        drafter is then what it was when the window began, and `train_step` returns None from then on. Memory that runs
        out in the optimizer step of several ranks, whose collectives the others wait in, is raised as it is.
        """
        if not self.enabled or self._read_tables is None or self._awaits_vocabulary:
            return None
        sample = self.buffer.sample(self._tokens * self._tp.size)
        if sample is None:
            return None
        started = time.perf_counter()
        try:
            metrics = self._learn(sample)
        except DrafterError as error:
            self.disable(str(error))
            raise
        # Own share only: the shares of a group's ranks add up to the tokens that their one drafter was trained on.
        self.window_tokens += sum(s.num_bases for s in self._share(sample))
        self.window_seconds += time.perf_counter() - started
        return metrics

    def disable(self, reason: str) -> None:
        """Ends training on this rank: the drafter is again what it was when the window began."""
        self.failure = reason
        self.drop_window()

    def _share(self, sample: list[DraftSequence]) -> list[DraftSequence]:
        return sample[self._tp.rank :: self._tp.size]

    def _learn(self, sample: list[DraftSequence]) -> dict[str, float]:
        metrics = self._gradient(sample)
        alone = self._tp.size == 1  # else the others are in the step's collectives, and no roll-back ends their wait
        with _memory_errors("the drafter's optimizer step") if alone else nullcontext():
            metrics |= self._trainer.apply(1.0 + self._extra_lr * (1.0 - metrics["accept/1"]))
            self._state.update_mean(min(self._decay, self.trained_steps / (self.trained_steps + _MEAN_START)))
        return metrics

    def _gradient(self, sample: list[DraftSequence]) -> dict[str, float]:
        """Sets the gradient of this rank's share; returns metrics summed over the tensor-parallel group.

        Raises DrafterError on all its ranks if there is one on any: none then waits for another in `apply`.
        """
        share, counts = self._share(sample), bases_by_step(sample, self._draft_steps)
        steps = range(1, self._draft_steps + 1)
        names = ["loss", "tokens", *(f"{kind}/{j}" for kind in self._trainer.kind.loss_parts for j in steps)]
        metrics: dict[str, float] = dict.fromkeys(names, 0.0)
        failure: DrafterError | None = None
        self._state.free_gradients()
        if not self._has_tables:
            assert self._read_tables is not None
            self._trainer.set_policy(*self._read_tables())
            self._has_tables = True
        try:  # nothing in here waits for another rank
            with _memory_errors(f"a drafter micro-step of {self._tokens} tokens"):
                if self._before is None:
                    self._state.remember()
                    self._before = self._state.steps, self.trained_steps
                if share:
                    metrics |= self._trainer.backward(collate(share, self._device), counts)
        except DrafterError as error:
            failure = error
        if self._tp.size > 1:
            values = torch.tensor([float(failure is not None), *metrics.values()], device=self._device)
            self._tp.all_reduce(values)
            failed, *summed = values.tolist()
            metrics = dict(zip(metrics, summed, strict=True))
            if failed and failure is None:
                failure = DrafterError("another rank of the tensor-parallel group failed")
        if failure is not None:
            raise failure
        return metrics

    def _close_window(self) -> None:
        self._before, self.window_tokens, self.window_seconds = None, 0, 0.0
        self._free()

    def _free(self) -> None:
        """Frees what only micro-steps need: gradients, and the tables of a policy that is updated next."""
        self._state.free_gradients()
        self._trainer.set_policy(self._no_table, self._no_table)
        self._has_tables = False

    # -- between windows ------------------------------------------------------------------------------------

    def merge(
        self, all_reduce: Callable[[Tensor], None], rank: int = 0, size: int = 1, at_once: bool = True
    ) -> MergeReport:
        """Makes one drafter of all ranks' again: all of the state is means, weighted by the tokens trained on.

        Without `at_once` it is put off, and the window goes on, where it would cost too much for so little training
        (`drafter.online.merge_share`), by the seconds that merges took before.

        Collective over the `size` ranks; `all_reduce` sums over them in place, with the same bits on every rank (called
        once if no rank trained, and then nothing changes). Afterwards all ranks hold the same bits. If the drafter of a
        replica that trained is not finite, all ranks go back to where the window began and train no more.
        """
        if self._awaits_vocabulary:
            self._choose_vocabulary(all_reduce)
        state, mine = self._state, self.window_tokens
        is_broken = self._before is not None and not state.is_finite()
        counts = (mine, state.steps, self.trained_steps, not self.enabled, is_broken, *self._covered())
        row = [*map(float, counts), self.window_seconds, self.merge_seconds]
        table = torch.zeros(size, len(row), dtype=torch.float64, device=self._device)  # each rank fills its row
        table[rank] = torch.tensor(row, dtype=torch.float64)
        all_reduce(table)
        *columns, training, merging = table.T.tolist()
        whole = ([int(x) for x in column] for column in columns)
        tokens, steps, trained, disabled, broken, covered, drawn = whole
        coverage = sum(covered) / max(1, sum(drawn))
        total, rolled_back = sum(tokens), any(broken)
        failed = tuple(r for r, is_disabled in enumerate(disabled) if is_disabled)
        if not at_once and not rolled_back and max(merging) * size > self._merge_share * sum(training):
            self._free()
            return MergeReport(tuple(tokens), failed, rolled_back, coverage)
        started = time.perf_counter()
        if rolled_back:
            self.disable(self.failure or "a replica's drafter was not finite")
        elif total:
            first = rank - self._tp.rank  # the ranks of a replica have trained one drafter
            state.merge(sum(tokens[first : first + self._tp.size]) / total, all_reduce)
            state.steps, self._trainer.trained_steps = max(steps), max(trained)
            self.version += 1
            self.merge_seconds = time.perf_counter() - started
        self._close_window()
        return MergeReport(tuple(tokens), failed, rolled_back, coverage)

    def _choose_vocabulary(self, all_reduce: Callable[[Tensor], None]) -> None:
        """The vocabulary becomes the most frequent tokens of the step's responses of all ranks, if there are any."""
        counts = self.buffer.token_counts(self.model.config.policy.vocab_size).to(self._device)
        all_reduce(counts)
        if self._read_tables is None or not bool(counts.any()):
            return
        self.model.choose_vocabulary(self._read_tables()[1], counts)
        for name in self.model.head_parameters:
            self._state.reset(name)
        self._awaits_vocabulary = False
        self.version += 1

    def _covered(self) -> tuple[int, int]:
        """Tokens of the step's responses that the drafter can draft, and all of them."""
        counts, ids = self.buffer.token_counts(self.model.config.policy.vocab_size), self.model.token_ids()
        return int((counts if ids is None else counts[ids.cpu()]).sum()), int(counts.sum())

    def drop_window(self) -> None:
        """This rank's drafter is again what it was when the window began."""
        if self._before is not None:
            self._state.restore()
            self._state.steps, self._trainer.trained_steps = self._before
        self._close_window()

    def weights(self) -> dict[str, Tensor]:
        """All tensors of the merged drafter (`DrafterConfig.shapes`). Collective in a tensor-parallel group.

        They are the running mean of the weights in training (`_MEAN_DECAY`); see `TrainingState.mean`.
        """
        return {**self._state.mean(), **self._vocabulary}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Drafter, moments and versions: copies of tensors in the host's memory, and JSON-able values.

        Not the buffer's data, and not a failure: a resumed run tries again. Collective in a tensor-parallel group,
        of which only the first rank gets the tensors.

        Only between merge and the next micro-step: before a merge, ranks have no common state. Else DrafterError.
        """
        if self._before is not None:
            raise DrafterError("the drafter can be saved after a merge only: replicas differ before it")
        kept = self._state.named()
        return {
            **kept,
            MEAN: kept[MEAN] | (self._vocabulary if kept[MEAN] else {}),
            "trained_steps": self.trained_steps,
            "version": self.version,
            "about": drafter_entries(self.model.config),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned. Raises CheckpointError if its tensors do not fit this drafter."""
        for kind in STATE_NAMES:
            if kind not in state:
                raise CheckpointError(f"the drafter's state has no {kind!r}")
            self.model.config.check(self._vocabulary | state[kind])
        if self._awaits_vocabulary:
            for name, ids in self._vocabulary.items():
                ids.copy_(state[MEAN][name])
            self._awaits_vocabulary = not state["version"]
        for name, ids in self._vocabulary.items():
            if not torch.equal(ids.cpu(), state[MEAN][name].cpu()):
                raise CheckpointError(f"the drafter's state is of another draft vocabulary ({name})")
        self._state.load(state)
        self._trainer.trained_steps = int(state["trained_steps"])
        self.version = int(state["version"])
        self._close_window()


@contextmanager
def _memory_errors(where: str) -> Iterator[None]:
    """Running out of the device's or of pinned memory becomes a DrafterError; any other error passes."""
    try:
        yield
    except RuntimeError as error:
        texts = ("out of memory", "can't allocate memory")  # pinned memory, and a CPU's
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts):
            raise DrafterError(f"out of memory in {where}: {error}") from error
        raise

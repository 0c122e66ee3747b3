"""`OnlineDrafterTrainer`: trains the drafter on one rank while slower ranks roll out, and merges the ranks' drafters.

    rank 0   rollout ================================== | score .. update | merge | sync policy and drafter
    rank 1   rollout ============ | train train train . | score .. update | merge | sync policy and drafter
                     hidden states of finished responses --^     |
                          or, to the next step's windows, <----- of the responses that it passes (actor.hidden_states)

A *window* is the time from one merge to the next, of one or several steps: a merge that would take more than
`drafter.online.merge_share` of the seconds trained in it is put off. Gradients exist in micro-steps only. Embedding and
LM head are those of the policy that rolls out, where its engine keeps them: responses of the versions before it are
read through them, too. Legend: R ranks, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.lr_schedule import LearningRate
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.drafters.checkpoint import drafter_entries
from megatron_tlt.drafters.model import DrafterModel
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafters.training.buffer import HiddenStateBuffer
from megatron_tlt.drafters.training.fp8 import use_fp8
from megatron_tlt.drafters.training.run_drafter import RunDrafter
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.drafters.training.trainer import DrafterTrainer, by_width
from megatron_tlt.drafters.training.training_state import MEAN, STATE_NAMES, TrainingState
from megatron_tlt.errors import CheckpointError, DrafterError
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.observe.reduction import RankMetrics, sums
from megatron_tlt.types import HiddenStateSample

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.training.run_drafter import Tables
    from megatron_tlt.interfaces import RolloutBackend

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_WIDTH = 128  # hidden size up to which learning rates are taken as they are
_WARMUP = 10  # optimizer steps of linear warm-up, once in a run
_MEAN_DECAY = 0.99  # of the mean of the weights that engines draft with, a micro-step: gradients are mostly noise
_MEAN_START = 9  # of an untrained drafter it is 0.1 after the first step, 0.9 after 81: the mean forgets its start

# Policy versions by which hidden states may be older than the policy that rolls out, whose embedding and LM head read
# them all: at RL's learning rates eight updates hardly move these.
_MAX_AGE = 8


class OnlineDrafterTrainer(RunDrafter):
    """One rank's drafter in training. Between merges replicas differ; the ranks of a tensor-parallel group never do.

    A rank that fails goes back to where the window began and contributes nothing; from the next merge on none trains.
    """

    def __init__(
        self,
        model: DrafterModel,
        section: DrafterSection,
        *,
        temperature: float = 1.0,
        tp: TensorParallel | None = None,
        world: World | None = None,
        sharing: HiddenStateSharing | None = None,
        device: torch.device | str = "cpu",
        from_actor: bool = False,
        fresh: bool = False,
        seed: int = 0,
    ):
        """`model` (all of it, no shard) has the starting drafter's weights in fp32; the trainer owns it, moves it to
        `device` in the type of `section` and replaces its linears for `section.online.fp8`: ConfigError where that is
        not available. Replicas merge over `world` (None: there is one rank) and exchange responses by `sharing`.
        `from_actor`: hidden states come in by `take_step`, not from engines. `fresh`: the drafter is untrained. Its
        learning rate begins at `online.start_lr`; a reduced vocabulary is that of the first responses of all ranks, and
        training begins with the merge that has them. `seed`: of the order of the data.
        """
        sharing = sharing or HiddenStateSharing()
        super().__init__(model.config, sharing.replica)
        online, self._device = section.online, torch.device(device)
        sizes = section.sizes(self._device.type)
        self.model, self._tp = model, tp or TensorParallel()
        self._world, self._sharing = world, sharing
        self._ranks: World | TensorParallel = world or TensorParallel()  # that merge
        self._tokens = sizes.micro_step_tokens
        self._draft_steps = section.online_draft_steps(KINDS[model.config.kind].facts)
        # Of a useless drafter, over lr.
        self._extra_lr = max(0.0, online.start_lr / online.lr - 1.0) if fresh else 0.0
        self._decay, self._merge_share = _MEAN_DECAY, online.merge_share
        self._mean_start = _MEAN_START if fresh else 0
        window = min(section.max_sequence_tokens, sizes.micro_step_tokens)
        self.buffer = HiddenStateBuffer(int(sizes.buffer_mib * _MIB), window, _MAX_AGE, seed)
        self._read_tables: Tables | None = None  # None: no rollout has begun
        self.actor_layers = model.config.aux_layers if from_actor else None
        start = {name: p.detach() for name, p in model.named_parameters()}
        model.to(self._device, DTYPES[sizes.dtype])
        precision = nullcontext if online.fp8 == "off" else use_fp8(model, self._device)
        self._vocabulary = dict(model.named_buffers())  # of a reduced one; never trained
        self._awaits_vocabulary = fresh and model.config.reduced
        self._state = TrainingState(model, start, self._tp)
        self._trainer = DrafterTrainer(
            model,
            section.model_copy(update={"draft_steps": self._draft_steps}),
            temperature,
            precision=precision,
            state=self._state,
            rate=LearningRate(by_width(model, _WIDTH) * online.lr, _WARMUP),
        )
        self.version = 0  # merges that changed the drafter
        self._merge_seconds = 0.0  # of the last merge that changed the drafter, and of the exchange that followed
        self.has_failed = False  # this rank's training has
        self._is_training = True  # until a rank's has failed: on that rank at once, on the others with the next merge
        self._tables: tuple[Tensor, Tensor] | None = None  # None: not read since the policy changed
        self._close_window()

    @property
    def trained_steps(self) -> int:
        """Optimizer steps behind the present weights: the most of any replica, summed over windows."""
        return self._state.steps

    # -- a window -------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int, tables: Tables) -> None:
        """A rollout by `policy_version` begins: drops responses that are too old. `tables` reads embedding and LM head
        of the engine that rolls out, which stay as they are until the window ends; collective in a tensor-parallel
        group.
        """
        if self.actor_layers is None:
            self.buffer.begin_step(policy_version)
        self._read_tables = tables

    @contextmanager
    def collecting(self, backend: RolloutBackend) -> Iterator[None]:
        if self.actor_layers is not None or not self._is_training:
            yield
            return
        backend.collect_hidden_states(self.buffer.add, self.buffer.offer)
        try:
            yield
        finally:
            backend.collect_hidden_states(None)
            self.buffer.drop_offered()

    def num_samples(self) -> int:
        return len(self.buffer)

    def buffer_metrics(self) -> RankMetrics:
        """Of this rank's buffer; all ranks of an engine hold the same responses, which its first one counts."""
        held = self.buffer.metrics()
        if self._tp.rank > 0:
            held = {**dict.fromkeys(held, 0), "bytes": held["bytes"]}
        return sums({f"drafter/buffer/{name}": value for name, value in held.items()})

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
        if not self._is_training or self._read_tables is None or self._awaits_vocabulary:
            return None
        sample = self.buffer.sample(self._tokens * self._tp.size)
        if sample is None:
            return None
        started = time.perf_counter()
        try:
            metrics = self._learn(sample)
        except DrafterError:
            self.disable()
            raise
        # Own share only: the shares of a group's ranks add up to the tokens that their one drafter was trained on.
        self.window_tokens += sum(s.num_bases for s in self._share(sample))
        self._window_seconds += time.perf_counter() - started
        return metrics

    def disable(self) -> None:
        """Ends training on this rank: the drafter is again what it was when the window began."""
        self.has_failed, self._is_training = True, False
        self.drop_window()

    def _close_window(self) -> None:
        """The state is what the next window begins with."""
        self.window_is_begun = False  # else the state was copied, for a failure to take the window back
        self.window_tokens, self._window_seconds = 0, 0.0  # trained on, and in micro-steps, by this rank
        self._free()

    def _share(self, sample: list[DraftSequence]) -> list[DraftSequence]:
        return sample[self._tp.rank :: self._tp.size]

    def _learn(self, sample: list[DraftSequence]) -> dict[str, float]:
        metrics = self._gradient(sample)
        alone = self._tp.size == 1  # else the others are in the step's collectives, and no roll-back ends their wait
        with _memory_errors("the drafter's optimizer step") if alone else nullcontext():
            metrics |= self._trainer.apply(1.0 + self._extra_lr * (1.0 - metrics["accept/1"]))
            self._state.update_mean(min(self._decay, self.trained_steps / (self.trained_steps + self._mean_start)))
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
        if self._tables is None:  # in a step's first micro-step
            assert self._read_tables is not None
            self._tables = self._read_tables()
        try:  # nothing in here waits for another rank
            with _memory_errors(f"a drafter micro-step of {self._tokens} tokens"):
                if not self.window_is_begun:
                    self._state.remember()
                    self.window_is_begun = True
                if share:
                    metrics |= self._trainer.backward(collate(share, self._device), self._tables, counts)
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

    # -- between windows ------------------------------------------------------------------------------------

    def merge(self, at_once: bool = True) -> dict[str, float]:
        """`merge_replicas`; with a merge that changes the drafter replicas exchange hidden states. Collective."""
        version = self.version
        metrics = self.merge_replicas(at_once)
        if self._world is not None and self._is_training and self.version != version:
            started = time.perf_counter()
            self._sharing.exchange(self._world, self.buffer, self.version)
            self._merge_seconds += time.perf_counter() - started
        return metrics

    def merge_replicas(self, at_once: bool = True) -> dict[str, float]:
        """Makes one drafter of all ranks' again: all of the state is means, weighted by the tokens trained on.

        Without `at_once` it is put off, and the window goes on, where it would cost too much for so little training
        (`drafter.online.merge_share`), by the seconds that merges took before.

        Collective, with one all-reduce if no rank trained, and then nothing changes. Afterwards all ranks hold the same
        bits. If the drafter of a replica that trained is not finite, all ranks go back to where the window began. Then,
        and where a rank has failed, none trains any more. Returns metrics, the same on every rank.
        """
        if self._awaits_vocabulary:
            self._choose_vocabulary()
        state, ranks = self._state, self._ranks
        is_broken = self.window_is_begun and not state.is_finite()
        counts = (self.window_tokens, state.steps, self.has_failed, is_broken, *self._covered())
        row = [*map(float, counts), self._window_seconds, self._merge_seconds]
        table = torch.zeros(ranks.size, len(row), dtype=torch.float64, device=self._device)  # each rank fills its row
        table[ranks.rank] = torch.tensor(row, dtype=torch.float64)
        ranks.all_reduce(table)
        *columns, training, merging = table.T.tolist()
        tokens, steps, failed, broken, covered, drawn = ([int(x) for x in column] for column in columns)
        total, rolled_back = sum(tokens), any(broken)
        num_failed = ranks.size if rolled_back else sum(failed)
        if num_failed:
            self._is_training = False
        if at_once or rolled_back or max(merging) * ranks.size <= self._merge_share * sum(training):
            started = time.perf_counter()
            if rolled_back:
                if ranks.rank == 0:  # a rank's own failure has been logged by that rank
                    _log.warning("drafter training is off for the rest of the run: a replica's drafter was not finite")
                self.disable()
            elif total:
                first = ranks.rank - self._tp.rank  # the ranks of a replica have trained one drafter
                state.merge(sum(tokens[first : first + self._tp.size]) / total, ranks.all_reduce)
                state.steps = max(steps)
                self.version += 1
                self._merge_seconds = time.perf_counter() - started
            self._close_window()
        else:
            self._free()
        return {
            "drafter/version": float(self.version),
            "drafter/disabled": float(num_failed),
            **({"drafter/coverage": sum(covered) / sum(drawn)} if any(drawn) else {}),
        }

    def _free(self) -> None:
        """Frees what only micro-steps need: gradients, and the tables of a policy that is updated next."""
        self._state.free_gradients()
        self._tables = None

    def _choose_vocabulary(self) -> None:
        """The vocabulary becomes the most frequent tokens of the step's responses of all ranks, if there are any."""
        counts = self.buffer.token_counts(self.model.config.policy.vocab_size).to(self._device)
        self._ranks.all_reduce(counts)
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
        if self.window_is_begun:
            self._state.restore()
        self._close_window()

    def unpublished(self) -> tuple[Mapping[str, Tensor], int] | None:
        return (self.weights(), self.version) if self.version != self._published else None

    def weights(self) -> dict[str, Tensor]:
        """All tensors of the merged drafter (`DrafterConfig.shapes`). Collective in a tensor-parallel group.

        They are the running mean of the weights in training (`_MEAN_DECAY`); see `TrainingState.mean`.
        """
        return {**self._state.mean(), **self._vocabulary}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any] | None:
        """Drafter, moments and versions: copies of tensors in the host's memory, and JSON-able values; None on replicas
        but the first, of which only the first rank gets the tensors.

        Not the buffer's data, and not a failure: a resumed run tries again. Collective: a merge that was put off is
        made first (after a signal; other checkpoints follow a merge).
        """
        self.merge_replicas()
        if self._replica:
            return None
        kept = self._state.named()
        return {
            **kept,
            MEAN: kept[MEAN] | (self._vocabulary if kept[MEAN] else {}),
            "trained_steps": self.trained_steps,
            "version": self.version,
            "about": drafter_entries(self.model.config),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes what `state_dict` returned. Raises CheckpointError for another drafter's."""
        if state is None:
            return
        self._check(state)
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
        self.version, self._published = int(state["version"]), None
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

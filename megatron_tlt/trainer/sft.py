"""Supervised fine-tuning (`megatron-tlt sft`): JSONL in, Hugging Face directory out, through the same actor as RL."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.checkpoint.export import write_hf
from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.config.checks.files import note_maker
from megatron_tlt.data.completions import forget_completions, read_sequences
from megatron_tlt.data.packing import balance
from megatron_tlt.distributed.exchange import sum_over_replicas
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.peft import ADAPTER_WEIGHTS
from megatron_tlt.observe.jsonl import StepFile
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.resilience.run_lock import lock_run_dir
from megatron_tlt.resilience.shutdown import GracefulShutdown
from megatron_tlt.trainer.job import Job, State
from megatron_tlt.types import TrainBatch, TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.algorithms.base import LossInputs
    from megatron_tlt.config.root import SftConfig, SftSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.signals import StopSignals

_log = logging.getLogger(__name__)

LOSSES_FILE = "losses.jsonl"  # in `sft.out`: a row a step
_LINES = 20  # of a training, beside those of its evaluations


class CompletionLoss:
    """Negative log-likelihood of the completion's tokens, summed."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum over unmasked tokens (0-d) and its metric sums."""
        nll = -(inputs.logprobs * inputs.mask).sum()
        return nll, {"nll": nll.detach()}


def steps_of(sequences: Sequence[TrainSequence], tokens_per_step: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Endless optimizer steps: whole sequences, shuffled anew each epoch, up to `tokens_per_step` tokens each."""
    step: list[TrainSequence] = []
    epoch, size = 0, 0
    while True:
        for index in np.random.default_rng((seed, epoch)).permutation(len(sequences)):
            sequence = sequences[int(index)]
            if step and size + sequence.trajectory.length > tokens_per_step:
                yield step
                step, size = [], 0
            step.append(sequence)
            size += sequence.trajectory.length
        epoch += 1


def _filler_warning(sequences: Sequence[TrainSequence], tokens_per_step: int, dp: int) -> str | None:
    """The warning where a mean step has fewer sequences than the `dp` replicas, so that some compute fillers only."""
    mean = sum(s.trajectory.length for s in sequences) / len(sequences)
    count = max(1, int(tokens_per_step / mean))
    if count >= dp:
        return None
    return (
        f"sft.tokens_per_step = {tokens_per_step} is about {count} records of {mean:.0f} tokens, and there are {dp} "
        f"data-parallel replicas: the others compute nothing. With {math.ceil(dp * mean)} tokens each has a record"
    )


def _passes_line(sequences: Sequence[TrainSequence], sft: SftSection) -> str:
    """How often the steps go through the training records."""
    tokens = sum(s.trajectory.length for s in sequences)
    taken = sum(map(len, islice(steps_of(sequences, sft.tokens_per_step, sft.seed), sft.num_steps)))
    return f"{len(sequences)} records, {tokens} tokens: {sft.num_steps} steps are {taken / len(sequences):.4g} passes"


def _fingerprint(config: SftConfig, sequences: Sequence[TrainSequence]) -> str:
    """Digest of the training records, of what decides their order, and of the model and adapter at the start."""
    sft, model, lora = config.sft, config.model, config.actor.lora
    start = f"{model.megatron_path or policy_fingerprint(model.path)} {sft.seed} {sft.tokens_per_step}".encode()
    if lora is not None and lora.adapter_path is not None:
        start += (Path(lora.adapter_path) / ADAPTER_WEIGHTS).read_bytes()
    return _digest(sequences, start)


def _digest(sequences: Sequence[TrainSequence], start: bytes = b"") -> str:
    """Of records, behind `start`."""
    digest = hashlib.sha256(start)
    for sequence in sequences:
        digest.update(sequence.trajectory.token_ids.tobytes() + sequence.loss_mask.tobytes() + b"|")
    return digest.hexdigest()


class SftTrainer(Job):
    """Trains on completions and writes the result; its checkpoints and lock are in OUT/unfinished until then."""

    name = "sft"
    config: SftConfig
    done = 0
    _rows: StepFile | None = None  # of rank 0

    def __init__(self, config: SftConfig, world: World, tokenizer: HFTokenizer, signals: StopSignals | None = None):
        """Collective. Raises DataError for a bad record, RunDirectoryError if another job writes the same OUT."""
        sft = config.sft
        self.config, self.world, self.num_steps = config, world, sft.num_steps

        def read(path: str, split: str) -> list[TrainSequence]:
            sequences, long = read_sequences(sft, Path(path), split, tokenizer, config.model.max_context)
            if long is not None and world.is_main:
                _log.warning(long)
            return sequences

        self._train = read(sft.train_path, sft.train_split)
        self._eval = [] if sft.eval_path is None else read(sft.eval_path, sft.eval_split)
        forget_completions()
        self._fingerprint = _fingerprint(config, self._train)
        lock = lock_run_dir("sft.out", sft.out, config.state_dir, world)
        self.shutdown = GracefulShutdown(world, config.stop, signals)
        self.policy = MegatronPolicy(
            world,
            config.model,
            config.actor,
            config.optimizer,
            CompletionLoss(),
            total_optimizer_steps=config.optimizer_steps,
            seed=sft.seed,
        )
        at = config.state_dir
        self.nonfinite = NonFiniteGuard(sft.max_lost_steps, at, world, self.policy.dims, "sft.max_lost_steps")
        self.checkpoints = CheckpointManager(config.checkpoint, at, sft.num_steps, self.policy, world, lock)

    def load(self, state: State | None) -> None:
        """Raises CheckpointError for a checkpoint of other training records."""
        if state is not None:
            if state.get("sft") != self._fingerprint:
                changed = (
                    "other records, another order of them (sft.seed, sft.tokens_per_step), another model or another "
                    "actor.lora.adapter_path"
                )
                problem = f"the checkpoint of step {state['step']} is of {changed}"
                raise CheckpointError(f"{problem}: restore them, or start anew with checkpoint.resume=never")
            self.done = state["step"]
            self.note(f"resumes after step {self.done} of {self.num_steps}")

    def begin(self) -> bool:
        """Opens the display and the steps that are not done."""
        sft = self.config.sft
        if self.world.is_main:
            self.note(_passes_line(self._train, sft))
            if (warning := _filler_warning(self._train, sft.tokens_per_step, self.policy.dims.dp)) is not None:
                _log.warning(warning)
        self.progress = build_progress("auto", sft.num_steps, self.world.rank)
        self._steps = islice(steps_of(self._train, sft.tokens_per_step, sft.seed), self.done, None)
        self._started, self._tokens = time.perf_counter(), 0
        self._rows = StepFile(Path(sft.out) / LOSSES_FILE, self.done) if self.world.is_main else None
        return True

    def step(self) -> None:
        """A signal before the update drops it; after that the step is finished."""
        sft, step = self.config.sft, self.done + 1
        assert self.progress is not None, "see `begin`"
        self.progress.work("sft: steps done", self.done, sft.num_steps)
        sequences = next(self._steps)
        self.world.enter("update", step)
        self.shutdown.sync("update")
        batch = self._share(sequences)
        out = self.policy.train_step(batch)
        self.nonfinite.look(step, batch, out)
        self.done = step
        self.shutdown.step_done()
        self._tokens += sum(s.trajectory.length for s in sequences)
        self._report(step, out.metrics, self._tokens / (time.perf_counter() - self._started))

    def state_dict(self) -> State:
        """What a checkpoint has beside policy and optimizer."""
        total = self.config.optimizer_steps  # of the learning-rate schedule
        return {"step": self.done, "sft": self._fingerprint, "total_optimizer_steps": total}

    def held_out_fingerprint(self) -> dict[str, str]:
        return {"sft.eval_path": _digest(self._eval)} if self._eval else {}

    def unsaved(self) -> str | None:
        """Without an update there is no state that could be loaded."""
        if not self.policy.has_stepped:
            return "there was no update yet, the next start begins anew"
        return self.nonfinite.unsaved()

    def save_if_due(self) -> None:
        super().save_if_due()
        self.nonfinite.check()

    def finish(self) -> None:
        """Writes `sft.out` and removes the checkpoints."""
        # Ends the last save, or does it again where it failed: what follows may fail, too.
        if self._keep() is not None:
            self.note("the last updates were not finite and are skipped: the result has the weights before them")
        self.world.enter("save", self.done)
        self._write()
        if self.world.is_main:
            self.remove_state()
            print(f"wrote {self.config.sft.out}", flush=True)

    def _write(self) -> None:
        config, out = self.config, Path(self.config.sft.out)
        if self.world.is_main:
            note_maker(out, "sft")  # first: what a kill leaves must have a maker
        write_hf(self.policy, self.world, config.model, out, config.actor.dtype)

    def evaluate(self) -> float:
        """Mean negative log-likelihood per token of the held-out records; NaN without any. Collective."""
        if not self._eval:
            return float("nan")
        mine = self._share(self._eval).mini_batches[0]
        logprobs = self.policy.logprobs(mine, temperature=1.0)
        masked = [float((lp * s.loss_mask).sum()) for lp, s in zip(logprobs, mine, strict=True)]
        sums = np.array([sum(masked), sum(float(s.loss_mask.sum()) for s in mine)])
        total = sum_over_replicas(self.world, self.policy.dims, sums)
        return float(-total[0] / total[1])

    def _share(self, sequences: Sequence[TrainSequence]) -> TrainBatch:
        """This replica's part of one optimizer step, balanced by tokens."""
        dims = self.policy.dims
        bins = balance([s.trajectory.length for s in sequences], dims.dp)
        me = dims.coordinates(self.world.rank).dp
        mine = [s for s, dp in zip(sequences, bins, strict=True) if dp == me]
        return TrainBatch([mine], [sum(float(s.loss_mask.sum()) for s in sequences)])

    def _report(self, step: int, metrics: dict[str, float], tokens_per_s: float) -> None:
        """Evaluates where it is due, and writes the step's row; some of them are shown. Collective."""
        sft = self.config.sft
        is_due = step % sft.eval_every == 0 or step == sft.num_steps
        row = {"loss": metrics["loss"]} | ({"held-out": self.evaluate()} if is_due and self._eval else {})
        row |= {"lr": metrics["lr"], "tokens/s": tokens_per_s}
        if self._rows is not None:
            self._rows.write_rows(step, row | {"grad_norm": metrics["grad_norm"]})
        if is_due or step % -(-sft.num_steps // _LINES) == 0:
            text = "  ".join(f"{name} {value:.4g}" for name, value in row.items())
            self.note(f"step {step}/{sft.num_steps}  {text}")

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        super().close()

"""Supervised fine-tuning (`megatron-tlt sft`): JSONL in, Hugging Face directory out, through the same actor as RL."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.checkpoint.export import write_hf
from megatron_tlt.checkpoint.manager import CheckpointManager
from megatron_tlt.checkpoint.resume import checkpoint_to_resume
from megatron_tlt.config.checks.files import note_maker
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.data.completions import encoded_records
from megatron_tlt.data.packing import balance
from megatron_tlt.distributed.exchange import sum_over_replicas
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.resilience.run_lock import lock_run_dir
from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown
from megatron_tlt.trainer.chat_settings import write_config
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.algorithms.base import LossInputs
    from megatron_tlt.config.root import SftConfig, SftSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.signals import StopSignals


class CompletionLoss:
    """Negative log-likelihood of the completion's tokens, summed."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum over unmasked tokens (0-d) and its metric sums."""
        nll = -(inputs.logprobs * inputs.mask).sum()
        return nll, {"nll": nll.detach(), "tokens": inputs.mask.sum()}


def read_records(
    sft: SftSection, path: Path, split: str, tokenizer: HFTokenizer, max_context: int
) -> list[TrainSequence]:
    """The records' sequences. Raises DataError naming file and record for one that cannot be encoded or exceeds
    `max_context` tokens.
    """
    sequences = []
    for number, where, (prompt, response, given) in encoded_records(sft, path, split, tokenizer, max_context):
        tokens = [*prompt, *response]
        if len(tokens) > max_context:
            raise DataError(f"{where}: {len(tokens)} tokens, model.max_context allows {max_context}")
        unknown = np.zeros(len(response), np.float32)
        sequences.append(TrainSequence.of(Trajectory(number, 0, np.array(tokens, np.int32), unknown, given)))
    return sequences


def steps_of(
    sequences: Sequence[TrainSequence], tokens_per_step: int, seed: int
) -> Iterator[list[TrainSequence]]:
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


def _fingerprint(config: SftConfig, sequences: Sequence[TrainSequence]) -> str:
    """Digest of the training records, of what decides their order, and of the model that training starts from."""
    sft, model = config.sft, config.model
    start = model.megatron_path or policy_fingerprint(model.path)
    digest = hashlib.sha256(f"{start} {sft.seed} {sft.tokens_per_step}".encode())
    for sequence in sequences:
        digest.update(sequence.trajectory.token_ids.tobytes() + sequence.loss_mask.tobytes() + b"|")
    return digest.hexdigest()


def refuse_other_records(config: SftConfig, world: World, fingerprint: str) -> None:
    """Raises ConfigError where the checkpoint to resume from is of other training records. Collective."""
    found = world.broadcast_object(checkpoint_to_resume(config) if world.is_main else None)
    if found is not None and found.extra.get("sft") != fingerprint:
        changed = "other records, another order of them (sft.seed, sft.tokens_per_step) or another model"
        allowed = f"the checkpoint of step {found.step} is of {changed}: restore them, or start anew with never"
        raise ConfigError.of("checkpoint.resume", config.checkpoint.resume, allowed)


class SftTrainer:
    """Trains on completions and writes the result; resumes a run that was interrupted.

    Its checkpoints and lock are in OUT/unfinished until OUT is written.
    """

    def __init__(
        self, config: SftConfig, world: World, tokenizer: HFTokenizer, signals: StopSignals | None = None
    ):
        """Collective. Raises DataError for a bad record, ConfigError for a checkpoint of other records,
        RunDirectoryError if another job writes the same OUT.
        """
        self._config, self._world, self._tokenizer = config, world, tokenizer
        sft = config.sft

        def read(path: str, split: str) -> list[TrainSequence]:
            return read_records(sft, Path(path), split, tokenizer, config.model.max_context)

        self._train = read(sft.train_path, sft.train_split)
        self._eval = [] if sft.eval_path is None else read(sft.eval_path, sft.eval_split)
        self._fingerprint = _fingerprint(config, self._train)
        refuse_other_records(config, world, self._fingerprint)
        self._run_dir = config.state_dir
        lock = lock_run_dir("sft.out", sft.out, self._run_dir, world)
        self._shutdown = GracefulShutdown(world, config.stop, signals)
        self.policy = MegatronPolicy(
            world,
            config.model,
            config.actor,
            config.optimizer,
            CompletionLoss(),
            total_optimizer_steps=sft.num_steps,
        )
        of_run = config.checkpoint, self._run_dir, sft.num_steps
        self._checkpoints = CheckpointManager(*of_run, self.policy, world, lock)
        self._done = 0  # steps

    def run(self) -> bool:
        """Trains up to `sft.num_steps` steps, writes `sft.out` and removes the run's checkpoints. Returns whether a
        signal ended it before. Collective.
        """
        self._resume()
        self._world.accept()
        if self._world.is_main:
            write_config(self._config, self._run_dir)
        try:
            self._train_steps()
        except GracefulExit as reason:
            self._save_and_leave(reason)
            return True
        self._world.enter("save", self._done)
        self._checkpoints.wait()
        self._write()
        if self._world.is_main:
            # Renamed first: what a kill leaves half removed must not look like checkpoints.
            finished = self._run_dir.with_name(f".{UNFINISHED}")
            shutil.rmtree(finished, ignore_errors=True)
            self._run_dir.rename(finished)
            shutil.rmtree(finished, ignore_errors=True)
        return False

    def _train_steps(self) -> None:
        """The steps that are not done. A signal before an update drops it; after that the step is finished."""
        sft, started, tokens = self._config.sft, time.perf_counter(), 0
        steps = islice(steps_of(self._train, sft.tokens_per_step, sft.seed), self._done, None)
        with closing(build_progress("auto", sft.num_steps, self._world.rank)) as progress:
            for step in range(self._done + 1, sft.num_steps + 1):
                progress.work("sft: steps", self._done, sft.num_steps)
                sequences = next(steps)
                self._world.enter("update", step)
                self._shutdown.sync("update")
                out = self.policy.train_step(self._share(sequences))
                self._done = step
                tokens += sum(s.trajectory.length for s in sequences)
                if step % sft.eval_every == 0 or step == sft.num_steps:
                    self._report(step, out.metrics, tokens / (time.perf_counter() - started))
                if step < sft.num_steps and sft.save_every and step % sft.save_every == 0:
                    self._world.enter("save", step)
                    self._write()
                self._world.enter("checkpoint", step)
                self._checkpoints.maybe_save(step, self._state, good=self.policy.has_stepped)
                if step < sft.num_steps:
                    self._shutdown.sync_after_step()

    def _state(self) -> dict[str, Any]:
        """What a checkpoint has beside policy and optimizer."""
        return {"step": self._done, "sft": self._fingerprint}

    def _resume(self) -> None:
        """Loads the checkpoint to resume from, if there is one. Mutates the policy and the steps done. Collective."""
        self._world.enter("load")
        loaded = self._checkpoints.load_latest()
        if loaded is None:
            return
        self._done = loaded["step"]
        self._say(f"resumes after step {self._done} of {self._config.sft.num_steps}")

    def _save_and_leave(self, reason: GracefulExit) -> None:
        """A checkpoint of the last finished step. Collective."""
        if saved := self.policy.has_stepped:  # without an update there is no state that could be loaded
            self._checkpoints.save_now(self._done, self._state())
        end = f"saved after step {self._done}, the next start goes on there"
        end = end if saved else "there was no update yet, the next start begins anew"
        self._say(f"stopped by {self._shutdown.reason()}: {reason}; {end}")

    def _write(self) -> None:
        config, out = self._config, Path(self._config.sft.out)
        if self._world.is_main:
            note_maker(out, "sft")  # first: what a kill leaves must have a maker
        write_hf(self.policy, self._world, config.model, out, config.actor.dtype)

    def close(self) -> None:
        """Releases the run directory; later signals are not seen."""
        self._shutdown.close()
        self._checkpoints.close()

    def evaluate(self) -> float:
        """Mean negative log-likelihood per token of the held-out records; NaN without any. Collective."""
        if not self._eval:
            return float("nan")
        mine = self._share(self._eval).mini_batches[0]
        logprobs = self.policy.logprobs(mine, temperature=1.0)
        masked = [float((lp * s.loss_mask).sum()) for lp, s in zip(logprobs, mine, strict=True)]
        sums = np.array([sum(masked), sum(float(s.loss_mask.sum()) for s in mine)])
        total = sum_over_replicas(self._world, self.policy.dims, sums)
        return float(-total[0] / total[1])

    def _share(self, sequences: Sequence[TrainSequence]) -> TrainBatch:
        """This replica's part of one optimizer step, balanced by tokens."""
        dims = self.policy.dims
        bins = balance([s.trajectory.length for s in sequences], dims.dp)
        me = dims.coordinates(self._world.rank).dp
        mine = [s for s, dp in zip(sequences, bins, strict=True) if dp == me]
        return TrainBatch([mine], [sum(float(s.loss_mask.sum()) for s in sequences)])

    def _report(self, step: int, metrics: dict[str, float], tokens_per_s: float) -> None:
        held_out = self.evaluate()
        shown = {"loss": metrics["loss"]} | ({"held-out": held_out} if self._eval else {})
        shown |= {"lr": metrics["lr"], "tokens/s": tokens_per_s}
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._say(f"step {step}/{self._config.sft.num_steps}  {text}")

    def _say(self, text: str) -> None:
        if self._world.is_main:
            print(f"sft {text}", flush=True)

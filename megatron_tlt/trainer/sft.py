"""Supervised fine-tuning (`megatron-tlt sft`): JSONL in, Hugging Face directory out, through the same actor as RL."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.actor.policy import MegatronPolicy
from megatron_tlt.checkpoint.export import write_hf
from megatron_tlt.data.completions import ResponseTokens, read_completions
from megatron_tlt.data.packing import balance
from megatron_tlt.distributed.exchange import sum_over_replicas
from megatron_tlt.errors import DataError
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.types import TrainBatch, TrainSequence, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.algorithms.base import LossInputs
    from megatron_tlt.config.root import SftConfig, SftSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.world import World


class CompletionLoss:
    """Negative log-likelihood of the completion's tokens, summed."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum over unmasked tokens (0-d) and its metric sums."""
        nll = -(inputs.logprobs * inputs.mask).sum()
        return nll, {"nll": nll.detach(), "tokens": inputs.mask.sum()}


def read_records(
    sft: SftSection, path: Path, split: str, tokenizer: HFTokenizer, max_context: int
) -> list[TrainSequence]:
    """Tokenizes prompts and completions; the end-of-sequence token ends each turn of the assistant.

    `sft.chat_template` wraps prompts in the tokenizer's chat template if it has one. Raises DataError naming file and
    record for one that is not of this form or exceeds `max_context` tokens.
    """
    chat = sft.chat_template and tokenizer.has_chat_template
    responses = ResponseTokens(tokenizer, max_context)
    sequences = []
    for row, number in zip(*read_completions(sft, path, split), strict=True):
        where = f"{path}:{number}"
        if chat:
            prompt = tokenizer.encode_chat(row.prompt, tools=row.tools)
        elif isinstance(row.prompt, str):
            prompt = tokenizer.encode(row.prompt)
        else:
            needed = "sft.chat_template and a tokenizer with a chat template"
            raise DataError(f"{where}: chat messages need {needed}")
        response, given = responses.encode(row, where)
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


class SftTrainer:
    """Trains on completions and writes the result."""

    def __init__(self, config: SftConfig, world: World, tokenizer: HFTokenizer):
        self._config, self._world, self._tokenizer = config, world, tokenizer
        sft = config.sft

        def read(path: str, split: str) -> list[TrainSequence]:
            return read_records(sft, Path(path), split, tokenizer, config.model.max_context)

        self._train = read(sft.train_path, sft.train_split)
        self._eval = [] if sft.eval_path is None else read(sft.eval_path, sft.eval_split)
        self.policy = MegatronPolicy(
            world,
            config.model,
            config.actor,
            config.optimizer,
            CompletionLoss(),
            total_optimizer_steps=sft.num_steps,
        )

    def run(self) -> None:
        """Trains `sft.num_steps` steps and writes `sft.out`. Collective."""
        sft = self._config.sft
        steps = steps_of(self._train, sft.tokens_per_step, sft.seed)
        started = time.perf_counter()
        tokens = 0
        with closing(build_progress("auto", sft.num_steps, self._world.rank)) as progress:
            for step in range(1, sft.num_steps + 1):
                progress.work("sft: steps", step - 1, sft.num_steps)
                self._world.enter("update", step)
                sequences = next(steps)
                tokens += sum(s.trajectory.length for s in sequences)
                out = self.policy.train_step(self._share(sequences))
                if step % sft.eval_every == 0 or step == sft.num_steps:
                    self._report(step, out.metrics, tokens / (time.perf_counter() - started))
                if step == sft.num_steps or (sft.save_every and step % sft.save_every == 0):
                    self._world.enter("save", step)
                    self._save()

    def _save(self) -> None:
        config = self._config
        write_hf(self.policy, self._world, config.model, Path(config.sft.out), config.actor.dtype)

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
        if self._world.is_main:
            shown = {"loss": metrics["loss"]} | ({"held-out": held_out} if self._eval else {})
            shown |= {"lr": metrics["lr"], "tokens/s": tokens_per_s}
            text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            print(f"sft step {step}/{self._config.sft.num_steps}  {text}", flush=True)

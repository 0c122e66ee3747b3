"""Training of a drafter before RL: roll out responses of the policy with their hidden states, train on them, measure.

Every replica generates for its own share of the prompts and trains on it; gradients are averaged, so all ranks hold the
same drafter. Legend: H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.config.dims import rollout_replica
from megatron_tlt.drafter.batching import DraftSequence, collate, epoch
from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.drafter.fingerprint import policy_fingerprint
from megatron_tlt.drafter.kinds.base import SavedDrafter
from megatron_tlt.drafter.kinds.registry import KINDS
from megatron_tlt.drafter.measure import MeasuredAcceptance, measure
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.drafters import DraftBatch, DrafterConfig
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.types import GenerateCall

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import HiddenStateSample, Prompt, SamplingParams

_EVAL_SEED_OFFSET = 0x5EED  # as in evaluation: not the noise of training rollouts


class DrafterPretraining:
    """Trains and measures a drafter of the policy in `config.model.path`, on this rank's share of the prompts."""

    def __init__(
        self,
        config: Config,
        world: World,
        backend: RolloutBackend,
        params: SamplingParams,
        drafter: DrafterConfig,
        start: SavedDrafter | None = None,
    ):
        """`backend` has the policy's weights and gives the states that `drafter` reads; `params` are those of training
        rollouts; without `start`, fresh weights.
        """
        self._config, self._world, self._backend, self._params = config, world, backend, params
        self._embed, self._head = lookup_tables(config.model.path, drafter.policy, world.device)
        self.model = KINDS[drafter.kind].build_model(drafter)
        self._is_fresh, self.trained_steps = start is None, 0
        if start is not None:
            self.model.load_full(start.weights.items())
            self.trained_steps = start.trained_steps
        self.model.to(world.device)

    def train(self, train: Sequence[Prompt], held_out: Sequence[Prompt], out: Path) -> MeasuredAcceptance:
        """`drafter.num_steps` optimizer steps from the model's present weights; writes `out`. Collective.

        Returns the measurement on the held-out prompts (empty without any), which is also written, as eval.json.
        """
        section = self._config.drafter
        started = time.perf_counter()
        self._world.enter("drafter rollout")
        data = self._responses(train, section.samples_per_prompt, self._params)
        tests = self.held_out(held_out)
        self._print(f"{sum(s.num_bases for s in data)} response tokens of this rank in {_since(started)}")
        if self._is_fresh:
            self._initialise(data)
        average = average_gradients if self._world.size > 1 else None
        temperature = self._params.temperature
        trainer = DrafterTrainer(self.model, self._embed, self._head, section, temperature, average)
        batches = self._batches(data)
        result = MeasuredAcceptance.empty(section.eval_steps)
        with closing(build_progress("auto", section.num_steps, self._world.rank)) as progress:
            for step in range(1, section.num_steps + 1):
                self._world.enter("drafter train", step)
                progress.work("drafter: steps", step - 1, section.num_steps)
                metrics = trainer.step(next(batches))
                if step % section.eval_every == 0 or step == section.num_steps:
                    result = self.measure(tests)
                    shown = " ".join(f"{x:.3f}" for x in result.overlap)
                    text = f"loss {metrics['loss']:.3f}  lr {metrics['lr']:.2e}  held-out 1-TV {shown}"
                    self._print(f"step {step}/{section.num_steps}  {text}  {_since(started)}")
        self.trained_steps += trainer.trained_steps
        if self._world.is_main:
            self._save(out, result)
        self._world.barrier()
        return result

    def _initialise(self, data: Sequence[DraftSequence]) -> None:
        """Fresh weights; a reduced vocabulary is that of the responses of all ranks. Collective."""
        counts = self._token_counts(data)
        self.model.start_fresh(self._config.drafter.seed, self._head, counts)
        if (chosen := self.model.token_ids()) is not None:
            share = float(counts[chosen.cpu()].sum() / counts.sum())
            self._print(f"drafts {len(chosen)} of {len(counts)} tokens: {share:.2%} of the responses' tokens")

    def _token_counts(self, data: Sequence[DraftSequence]) -> Tensor:
        """How often each token is in the responses of all ranks, int64 [V]. Collective."""
        counts = torch.zeros(self.model.config.policy.vocab_size, dtype=torch.int64)
        for s in data:
            counts += torch.bincount(s.token_ids[torch.from_numpy(s.drawn)], minlength=len(counts))
        return torch.stack(self._world.all_gather_object(counts)).sum(0)

    def held_out(self, prompts: Sequence[Prompt]) -> list[DraftSequence]:
        """One response to each of this replica's held-out prompts, with noise that training does not see."""
        return self._responses(prompts, 1, replace(self._params, seed=self._params.seed + _EVAL_SEED_OFFSET))

    def measure(self, tests: Sequence[DraftSequence]) -> MeasuredAcceptance:
        """Acceptance on `tests`, summed over the replicas. Collective."""
        section = self._config.drafter
        total = result = MeasuredAcceptance.empty(section.eval_steps)
        _, tp_rank = rollout_replica(self._world.rank, self._config.rollout.tp)
        if tp_rank == 0:
            result = measure(
                self.model,
                self._embed,
                self._head,
                tests,
                steps=section.eval_steps,
                temperature=self._params.temperature,
                batch_tokens=section.batch_tokens,
                window=section.max_sequence_tokens,
            )
        for part in self._world.all_gather_object(result):
            total = total + part
        return total

    def _save(self, out: Path, result: MeasuredAcceptance) -> None:
        save_drafter(
            out,
            self.model.config,
            self.model.state_dict(),
            policy_version=self._backend.policy_version,
            trained_steps=self.trained_steps,
            fingerprint=policy_fingerprint(self._config.model.path),
            dtype=DTYPES[self._config.drafter.save_dtype],
        )
        if result.bases:
            text = json.dumps(result.to_json(), indent=2)
            (out / "eval.json").write_text(text + "\n", encoding="utf-8")

    def _responses(self, prompts: Sequence[Prompt], samples: int, params: SamplingParams) -> list[DraftSequence]:
        """Responses to this replica's share of the prompts, with the policy's hidden states, on the CPU.

        All ranks of a replica call this together and get the same.
        """
        tp = self._config.rollout.tp
        replica, _ = rollout_replica(self._world.rank, tp)
        collected: list[HiddenStateSample] = []
        self._backend.collect_hidden_states(collected.append)
        mine = list(prompts)[replica :: self._world.size // tp]
        with closing(build_progress("auto", 0, self._world.rank)) as progress:
            call = GenerateCall(mine, params, samples)
            self._backend.generate(progress.watched(call, "drafter: responses of this rank", len(mine) * samples))
        self._backend.collect_hidden_states(None)
        collected.sort(key=lambda sample: (sample.trajectory.prompt_id, sample.trajectory.sample_index))
        return [DraftSequence.of(sample) for sample in collected]

    def _batches(self, data: Sequence[DraftSequence]) -> Iterator[DraftBatch]:
        """Epoch after epoch, without end."""
        if not any(s.num_bases for s in data):
            allowed = "must give every engine replica responses of two tokens or more"
            raise ConfigError.of("drafter.num_prompts", self._config.drafter.num_prompts, allowed)
        section = self._config.drafter
        for number in itertools.count():
            rng = np.random.default_rng((section.seed, number))
            for group in epoch(data, section.batch_tokens, section.max_sequence_tokens, rng):
                yield collate(group, self._world.device)

    def _print(self, text: str) -> None:
        if self._world.is_main:
            print(f"drafter {text}", flush=True)


def lookup_tables(path: str | Path, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The policy's embedding and LM head, float32 [V, H] each (the same tensor when tied)."""
    tables = {
        name: tensor.to(device, torch.float32) for name, tensor in iter_weights(path, config) if name in (EMBED, HEAD)
    }
    return tables[EMBED], tables.get(HEAD, tables[EMBED])


def average_gradients(gradients: list[Tensor]) -> None:
    """Means over all ranks, in place."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"

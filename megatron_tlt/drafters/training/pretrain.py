"""Training of a drafter before RL: responses of the policy with their hidden states, training on them, measurement.

Every replica has its own share of the responses and trains on it; gradients are averaged, so all ranks hold the same
drafter. Responses are generated, or given; hidden states come with generating, or else from one prefill.
Legend: H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.config.dims import is_first_of_engine, rollout_replica
from megatron_tlt.data.prompt_queue import PromptQueue
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.checkpoint import save_drafter
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, collate, epoch
from megatron_tlt.drafters.training.measure import MeasuredAcceptance, measure
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.hf.loader import weight_reader
from megatron_tlt.observe.progress import ProgressDisplay, build_progress
from megatron_tlt.types import GenerateCall, Trajectory

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import HiddenStateSample, Prompt, Sample, SamplingParams

_T = TypeVar("_T")
_EVAL_SEED_OFFSET = 0x5EED  # as in evaluation: not the noise of training rollouts
_MEASURED_TOKENS = 1024  # of a batch that is measured, at least: nothing is kept for a backward pass


class DrafterPretraining:
    """Trains and measures a drafter of the policy in `config.model.path`, on this rank's share of the responses."""

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
        self._section = config.drafter
        self._batch_tokens = config.drafter.step_tokens(world.device.type)
        self._tables = lookup_tables(config.model.path, drafter.policy, world.device)
        self.model = KINDS[drafter.kind].build_model(drafter)
        self._is_fresh, self.trained_steps = start is None, 0
        if start is not None:
            self.model.load_full(start.weights.items())
            self.trained_steps = start.trained_steps
        self.model.to(world.device)
        self._trainer: DrafterTrainer | None = None  # while it trains
        self._points: list[dict[str, float]] = []  # held-out measurements
        self._seconds = 0.0  # of optimizer steps
        self.result = MeasuredAcceptance.empty(config.drafter.eval_steps)
        """The last measurement on held-out responses."""

    # -- responses ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        generate: Callable[[GenerateCall], list[Sample]],
    ) -> list[DraftSequence]:
        """Responses to this replica's share of `prompts`, with the policy's hidden states, on the CPU.

        All ranks of a replica call this together and get the same. `generate` returns the responses, some of which its
        backend may not have generated: those are prefilled.
        """
        mine = self._share(prompts)
        found: dict[tuple[int, int], HiddenStateSample] = {}

        def keep(sample: HiddenStateSample) -> None:
            found[sample.trajectory.prompt_id, sample.trajectory.sample_index] = sample

        self._backend.collect_hidden_states(keep)
        try:
            with closing(build_progress("auto", 0, self._world.rank)) as progress:
                call = GenerateCall(PromptQueue(mine, 0, 1, len(mine), int), params, samples)
                call = progress.watched(call, "drafter: responses of this rank", len(mine) * samples)
                made = generate(call)
        finally:
            self._backend.collect_hidden_states(None)
        tokens = {prompt.prompt_id: prompt.token_ids for prompt in mine}
        others = [s for s in made if (s.prompt_id, s.sample_index) not in found]
        read = self._read([Trajectory.of(tokens[s.prompt_id], s) for s in others], params.seed)
        return _sequences([*found.values(), *read])

    def read(self, responses: Sequence[Trajectory]) -> list[DraftSequence]:
        """This replica's share of finished responses, with the hidden states that the policy has for them."""
        return _sequences(self._read(self._share(responses), self._params.seed))

    def _share(self, everything: Sequence[_T]) -> list[_T]:
        """Every R-th one, of R replicas."""
        tp = self._config.rollout.tp
        return list(everything[rollout_replica(self._world.rank, tp) :: self._world.size // tp])

    def _read(self, responses: Sequence[Trajectory], seed: int) -> list[HiddenStateSample]:
        """The hidden states of those of at least two tokens. Collective over all ranks."""
        wanted = [r for r in responses if r.length - r.response_start > 1]
        found: list[HiddenStateSample] = []
        with closing(build_progress("auto", 0, self._world.rank)) as progress:

            def keep(sample: HiddenStateSample) -> None:
                found.append(sample)
                progress.work("drafter: prefilled responses of this rank", len(found), len(wanted))

            if wanted:
                progress.work("drafter: prefilled responses of this rank", 0, len(wanted))
                self._backend.read_responses(wanted, seed, keep)
        self._world.wait_for_all()  # shares of prompts are not shares of tokens
        return found

    # -- training -------------------------------------------------------------------------------------------

    def begin(
        self,
        data: Sequence[DraftSequence],
        tests: Sequence[DraftSequence],
        progress: ProgressDisplay,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares `drafter.num_steps` optimizer steps on `data`, measured on `tests`; goes on from `state`, of an
        earlier start. Mutates the model. Collective.
        """
        section = self._section
        if state is not None:
            self.model.load_full(state["weights"].items())
        elif self._is_fresh:
            self._initialise(data)
        average = average_gradients if self._world.size > 1 else None
        self._trainer = DrafterTrainer(self.model, section, self._params.temperature, average)
        if state is not None:
            self._load(self._trainer, state)
        self._groups_left = itertools.islice(self._groups(data), self.steps_done, None)
        self._tests, self._progress = tests, progress

    def step(self) -> None:
        """One optimizer step, and a measurement where it is due, which becomes `result`. Collective."""
        assert self._trainer is not None, "see `begin`"
        num_steps, step = self._section.num_steps, self.steps_done + 1
        self._progress.work("drafter: steps done", step - 1, num_steps)
        started = time.perf_counter()
        metrics = self._trainer.step(collate(next(self._groups_left), self._world.device), self._tables)
        self._seconds += time.perf_counter() - started
        if step % self._section.eval_every == 0 or step == num_steps:
            self.result = self._measure_at(step, self._tests, self._progress, metrics)

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this training, also of earlier starts."""
        return 0 if self._trainer is None else self._trainer.trained_steps

    def _measure_at(
        self, step: int, tests: Sequence[DraftSequence], progress: ProgressDisplay, metrics: Mapping[str, float]
    ) -> MeasuredAcceptance:
        """Measures after `step` and prints a line."""
        result = self.measure(tests, progress)
        text = f"loss {metrics['loss']:.3f}  lr {metrics['lr']:.2e}"
        if result.bases:
            length = result.accepted_length
            self._points.append({"step": step, "seconds": self._seconds, "accepted_length": length})
            overlap = " ".join(f"{x:.3f}" for x in result.overlap)
            text += f"  held-out accepted {length:.2f}  1-TV {overlap}"
        self._print(f"step {step}/{self._section.num_steps}  {text}  {self._seconds:.0f} s")
        return result

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and measurements of a training under way, for `begin`; tensors in the host's memory. Empty
        without one.
        """
        return (
            {}
            if self._trainer is None
            else {
                "weights": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
                "training": self._trainer.state.named(),
                "seconds": self._seconds,
                "points": self._points,
            }
        )

    def _load(self, trainer: DrafterTrainer, state: Mapping[str, Any]) -> None:
        trainer.state.load(state["training"])
        self._seconds = state["seconds"]
        self._points = list(state["points"])
        self._print(f"goes on after step {trainer.trained_steps}/{self._section.num_steps}")

    def _initialise(self, data: Sequence[DraftSequence]) -> None:
        """Weights that start from the policy's. A reduced vocabulary is that of all ranks' responses. Collective."""
        counts = self._token_counts(data)
        read = weight_reader(self._config.model.path, self.model.config.policy)
        self.model.start_fresh(self._config.train.seed, read, self._tables[1], counts)
        if (chosen := self.model.token_ids()) is not None:
            share = float(counts[chosen.cpu()].sum() / counts.sum())
            self._print(f"drafts {len(chosen)} of {len(counts)} tokens: {share:.2%} of the responses' tokens")

    def _token_counts(self, data: Sequence[DraftSequence]) -> Tensor:
        """How often each token is in the responses of all ranks, int64 [V]. Collective."""
        counts = torch.zeros(self.model.config.policy.vocab_size, dtype=torch.int64)
        for s in data:
            counts += torch.bincount(s.token_ids[torch.from_numpy(s.drawn)], minlength=len(counts))
        return torch.stack(self._world.all_gather_object(counts)).sum(0)

    def _groups(self, data: Sequence[DraftSequence]) -> Iterator[list[DraftSequence]]:
        """Those of the optimizer steps, epoch after epoch, without end."""
        if not any(s.num_bases for s in data):
            allowed = "must give every engine replica responses of two tokens or more"
            raise ConfigError.of("drafter.num_prompts", self._section.num_prompts, allowed)
        section = self._section
        for number in itertools.count():
            rng = np.random.default_rng((self._config.train.seed, number))
            yield from epoch(data, self._batch_tokens, section.max_sequence_tokens, rng)

    # -- measuring and writing ------------------------------------------------------------------------------

    def measure(self, tests: Sequence[DraftSequence], progress: ProgressDisplay | None = None) -> MeasuredAcceptance:
        """Acceptance on `tests`, summed over the replicas. Collective."""
        section = self._section
        total = result = MeasuredAcceptance.empty(section.eval_steps)
        if is_first_of_engine(self._world.rank, self._config.rollout.tp):
            result = measure(
                self.model,
                *self._tables,
                tests,
                steps=section.eval_steps,
                temperature=self._params.temperature,
                batch_tokens=max(self._batch_tokens, _MEASURED_TOKENS),
                window=section.max_sequence_tokens,
                on_progress=None if progress is None else partial(progress.work, "drafter: measured batches"),
            )
        self._world.wait_for_all()  # as above, and of an engine one rank measures
        for part in self._world.all_gather_object(result):
            total = total + part
        return total

    def save(self, out: Path) -> None:
        """Writes the drafter and, as eval.json, its measurement. Rank 0 only."""
        save_drafter(
            out,
            self.model.config,
            self.model.state_dict(),
            policy_version=self._backend.policy_version,
            trained_steps=self.trained_steps + self.steps_done,
            fingerprint=policy_fingerprint(self._config.model.path),
        )
        if self.result.bases:
            over_time = {"over_time": self._points}
            text = json.dumps(self.result.to_json() | over_time, indent=2)
            (out / "eval.json").write_text(text + "\n", encoding="utf-8")

    def _print(self, text: str) -> None:
        if self._world.is_main:
            print(f"drafter {text}", flush=True)


def held_out_params(params: SamplingParams) -> SamplingParams:
    """Those of held-out responses: with noise that training does not see."""
    return replace(params, seed=params.seed + _EVAL_SEED_OFFSET)


def _sequences(samples: Sequence[HiddenStateSample]) -> list[DraftSequence]:
    """By prompt and sample."""
    ordered = sorted(samples, key=lambda s: (s.trajectory.prompt_id, s.trajectory.sample_index))
    return [DraftSequence.of(sample) for sample in ordered]


def lookup_tables(path: str | Path, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The policy's embedding and LM head, float32 [V, H] each (the same tensor when tied)."""
    read = weight_reader(path, config)
    embed = read(EMBED).to(device, torch.float32)
    return embed, embed if config.tie_word_embeddings else read(HEAD).to(device, torch.float32)


def average_gradients(gradients: list[Tensor]) -> None:
    """Means over all ranks, in place."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())

"""The drafter's warm-up: roll out the policy's answers, read its hidden states off a decoder pass, train, measure.

Every replica answers its own share of the prompts and trains on it; gradients are averaged, so all ranks hold the
same drafter. Legend: L tokens of a sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.distributed.dims import rollout_replica
from megatron_tlt.drafter.batching import DraftSequence, epoch
from megatron_tlt.drafter.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafter.measure import Acceptance, measure
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairBatch
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.models.keys import request_key
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.rollout.graph_pool import PooledDecoder

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.models.base import Decoder
    from megatron_tlt.models.eagle.eagle3 import Eagle3Model
    from megatron_tlt.types import Prompt, SamplingParams

_EVAL_SEED_OFFSET = 0x5EED  # as in evaluation: not the noise of training rollouts


class DrafterWarmUp:
    """Trains and measures a drafter of the policy in `config.model.path`, on this rank's share of the work."""

    def __init__(self, config: Config, world: World, backend: EmbeddedBackend, params: SamplingParams):
        """`backend` has the policy's weights; `params` are those of training rollouts."""
        self._config, self._world, self._backend, self._params = config, world, backend, params
        self.model_config = ModelConfig.from_hf(config.model.path)
        self._embed, self._head = lookup_tables(config.model.path, self.model_config, world.device)
        self.model = self._new_model().to(world.device)
        self.trained_steps = 0

    def _new_model(self) -> EagleModel | Eagle3Model:
        return EagleModel(self.model_config)

    def start(self, drafter: Path | None, seed: int) -> None:
        """Takes a drafter's weights, or fresh ones without. Raises CheckpointError for a drafter that does not fit."""
        model = self.model
        assert isinstance(model, EagleModel), "the other kind has a start of its own"
        if drafter is None:
            model.initialise(seed)
            return
        saved = load_drafter(drafter, self.model_config)
        model.load_full(saved.weights.items())
        self.trained_steps = saved.trained_steps

    def train(self, train: Sequence[Prompt], held_out: Sequence[Prompt], out: Path) -> Acceptance:
        """`drafter.num_steps` optimizer steps from the model's present weights; writes `out`. Collective.

        Returns the measurement on the held-out prompts (empty without any), which is also written, as eval.json.
        """
        section = self._config.drafter
        started = time.perf_counter()
        self._world.enter("drafter rollout")
        data = self.answers(train, section.samples_per_prompt, self._params)
        tests = self.held_out(held_out)
        self._say(f"{sum(s.num_bases for s in data)} answer tokens of this rank in {_since(started)}")
        trainer = self._trainer(data)
        batches = self._endless(data)
        result = Acceptance.empty(section.eval_steps)
        for step in range(1, section.num_steps + 1):
            self._world.enter("drafter train", step)
            metrics = trainer.step(next(batches))
            if step % section.eval_every == 0 or step == section.num_steps:
                result = self.measure(tests)
                shown = " ".join(f"{x:.3f}" for x in result.overlap)
                text = f"loss {metrics['loss']:.3f}  lr {metrics['lr']:.2e}  held-out 1-TV {shown}"
                self._say(f"step {step}/{section.num_steps}  {text}  {_since(started)}")
        self.trained_steps += trainer.trained_steps
        self.save(out, result)
        return result

    def _trainer(self, data: Sequence[DraftSequence]) -> DrafterTrainer:
        """A trainer of the model. Collective; `data` are this rank's training answers."""
        del data
        average = average_gradients if self._world.size > 1 else None
        section, temperature = self._config.drafter, self._params.temperature
        return DrafterTrainer(self.model, self._embed, self._head, section, temperature, average)

    def held_out(self, prompts: Sequence[Prompt]) -> list[DraftSequence]:
        """One answer to each of this replica's held-out prompts, with noise that training does not see."""
        return self.answers(prompts, 1, replace(self._params, seed=self._params.seed + _EVAL_SEED_OFFSET))

    def measure(self, tests: Sequence[DraftSequence]) -> Acceptance:
        """Acceptance on `tests`, summed over the replicas. Collective."""
        section = self._config.drafter
        result = Acceptance.empty(section.eval_steps)
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
                window=section.window,
            )
        total = Acceptance.empty(section.eval_steps)
        for part in self._world.all_gather_object((result.sums, result.bases)):
            total.add(Acceptance(*part))
        return total

    def save(self, out: Path, result: Acceptance | None = None) -> None:
        """Rank 0 writes the drafter and, if there is one, the measurement. Collective."""
        if self._world.is_main:
            self._write(out)
            if result is not None and result.bases:
                text = json.dumps(result.to_json(), indent=2)
                (out / "eval.json").write_text(text + "\n", encoding="utf-8")
        self._world.barrier()

    def _write(self, out: Path) -> None:
        save_drafter(
            out,
            self.model_config,
            self.model.state_dict(),
            policy_version=self._backend.policy_version,
            trained_steps=self.trained_steps,
            dtype=DTYPES[self._config.drafter.save_dtype],
        )

    def answers(self, prompts: Sequence[Prompt], samples: int, params: SamplingParams) -> list[DraftSequence]:
        """This replica's share of the prompts, answered, with the policy's hidden states. On the CPU.

        All ranks of a replica call this together and get the same.
        """
        tp = self._config.rollout.tp
        replica, _ = rollout_replica(self._world.rank, tp)
        mine = list(prompts)[replica :: self._world.size // tp]
        prompt_of = {p.prompt_id: p.token_ids for p in mine}
        drawn = self._backend.generate(mine, params, samples)
        texts = [[*prompt_of[s.prompt_id], *s.token_ids] for s in drawn]
        rollout = self._config.rollout
        states = policy_hidden(self._policy(), texts, rollout.block_size, rollout.max_batched_tokens)
        return [
            DraftSequence(
                torch.tensor(text),
                hidden,
                len(prompt_of[s.prompt_id]),
                key=request_key(params.seed, s.prompt_id, s.sample_index),
            )
            for s, text, hidden in zip(drawn, texts, states, strict=True)
        ]

    def _policy(self) -> Decoder:
        """What reads the policy's hidden states off the answers."""
        decoder = self._backend.engine.runner.decoder
        if isinstance(decoder, PooledDecoder):  # graphs serve the engine's cache only
            decoder = decoder.inner
        return cast("Decoder", decoder)

    def _endless(self, data: Sequence[DraftSequence]) -> Iterator[PairBatch]:
        if not any(s.num_bases for s in data):
            allowed = "must give every engine replica answers of two tokens or more"
            raise ConfigError.of("drafter.num_prompts", self._config.drafter.num_prompts, allowed)
        section, number = self._config.drafter, 0
        while True:
            seed = (section.seed, number)
            yield from epoch(data, section.batch_tokens, section.window, seed, self._world.device)
            number += 1

    def _say(self, text: str) -> None:
        if self._world.is_main:
            print(f"drafter {text}", flush=True)


def policy_hidden(
    decoder: Decoder, texts: Iterable[Sequence[int]], block_size: int, max_tokens: int
) -> Iterator[Tensor]:
    """The policy's hidden states [L, H] after its final norm of each text, on the CPU, in the decoder's type.

    Texts share forwards of at most `max_tokens` rows; a longer one has a forward of its own.
    """
    group: list[Sequence[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > max_tokens:
            yield from _hidden_of_group(decoder, group, block_size)
            group = []
        group.append(text)
    if group:
        yield from _hidden_of_group(decoder, group, block_size)


def _hidden_of_group(decoder: Decoder, texts: Sequence[Sequence[int]], size: int) -> Iterator[Tensor]:
    counts = [len(t) for t in texts]
    blocks = [-(-n // size) for n in counts]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    width = max(blocks)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lists = (
        [t for text in texts for t in text],
        [p for n in counts for p in range(n)],
        [b * size + p for b, n in zip(first, counts, strict=True) for p in range(n)],
        starts,
        counts,
        [[*range(b, b + n), *[0] * (width - n)] for b, n in zip(first, blocks, strict=True)],
        starts[1:2],
    )
    tensors = [torch.tensor(x, dtype=torch.int32, device=decoder.device) for x in lists]
    tensors[-1] -= 1  # one row's logits: the least that every decoder computes
    kv = decoder.new_kv_cache(sum(blocks), size)
    batch = replace(DecoderInput.of(tensors), all_hidden=True)
    hidden = decoder.forward(batch, kv).all_hidden
    assert hidden is not None, "asked for"
    yield from hidden.cpu().split(counts)


def lookup_tables(path: str | Path, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The policy's embedding and LM head, float32 [V, H] each (the same tensor when tied)."""
    tables = {
        name: tensor.to(device, torch.float32)
        for name, tensor in iter_weights(path, config)
        if name in (EMBED, HEAD)
    }
    return tables[EMBED], tables.get(HEAD, tables[EMBED])


def average_gradients(gradients: list[Tensor]) -> None:
    """Means over all ranks, in place, in one collective."""
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"

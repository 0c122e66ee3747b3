"""Small engines around real decoders, requests for them, and stand-ins for drafters, selectors, graphs and copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.decoder import CATCH_UP
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from megatron_tlt.models.decoders.torch.transfer import HostCopy
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.graph_capture import Captured
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.speculation.build import Drafting
from megatron_tlt.rollout.speculation.pre_rollouts import PreRolledDrafter
from megatron_tlt.rollout.speculation.speculator import Speculator
from megatron_tlt.types import NO_DRAFT, DraftStrategy, SamplingParams, StepMeasurement
from tests.helpers.stepping import run_out
from tests.helpers.tiny_drafters import catching_up, random_drafter

Job = tuple[int, list[int], SamplingParams, int]  # prompt id, prompt, params, samples
Responses = dict[tuple[int, int], tuple[list[int], list[float]]]


def small_config(family: str) -> ModelConfig:
    """A tiny model of a family, without importing transformers (slow on many ranks)."""
    heads, kv_heads = {"qwen2": (6, 2), "qwen3": (4, 4), "llama": (8, 1), "qwen2_moe": (6, 2)}[family]
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "moe_layers": (1,),
    }
    return ModelConfig(
        family,  # type: ignore[arg-type]
        vocab_size=131,
        hidden_size=64,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=family != "llama",
        qkv_bias=family in ("qwen2", "qwen2_moe"),
        qk_norm=family == "qwen3",
        **(experts if family == "qwen2_moe" else {}),  # type: ignore[arg-type]
    )


class CountingSampler(Sampler):
    """The PyTorch sampler; counts draws that rounding may decide."""

    near_ties = 0

    def _sample_part(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        heat = torch.from_numpy(rows.temperature).unsqueeze(1)
        scores = rows.apply_masks(logits.float() / torch.where(heat > 0, heat, 1.0))
        noise = gumbel_noise(key_tensor(rows.keys, logits.device), logits.shape[1])
        best = (scores + noise.masked_fill(heat == 0, 0.0)).topk(2).values
        self.near_ties += int((best[:, 0] - best[:, 1] <= 1e-5).sum())
        return super()._sample_part(logits, rows)


def make_engine(
    config: ModelConfig,
    weights: list[tuple[str, Tensor]],
    kernels: str = "native",
    num_blocks: int = 200,
    max_running: int = 16,
    budget: int = 128,
    tp=None,
    count_near_ties: bool = False,
    dtype: torch.dtype = torch.float32,
    numerics: str = "default",
    drafting: Callable[[Decoder], Drafting] | None = None,
    aux_layers: tuple[int, ...] = (),
) -> Engine:
    decoder = build_decoder(config, "cpu", dtype, kernels, 1, tp, numerics, aux_layers)
    decoder.load_weights(weights)
    engine = Engine(
        decoder,
        SchedulerLimits(max_running, budget, 256, config.vocab_size),
        num_blocks,
        16,
        eos_token_ids=(0,),
        tp=tp,
        native_sample=partial(keyed_sample, threads=1) if kernels == "native" else None,
        drafting=None if drafting is None else drafting(decoder),
    )
    if count_near_ties:
        engine.runner.sampler = CountingSampler(decoder.device)
    return engine


def speculating_engine(
    config: ModelConfig,
    weights: list[tuple[str, Tensor]],
    kernels: str = "native",
    drafter_weights: dict[str, Tensor] | None = None,
    *,
    speculation: dict[str, Any],
    shape: DrafterConfig | None = None,
    **sizes: Any,
) -> Engine:
    """As `make_engine`, with the fields of `rollout.speculation`, and `catch_up`, see `catching_up`; a trained drafter,
    of kind eagle by default, is random unless given.
    """
    drafter, fields = shape or EagleConfig.of(config), dict(speculation)
    catch_up = fields.pop("catch_up", CATCH_UP)

    def drafting(decoder: Decoder) -> Drafting:
        section = SpeculationSection(drafter_path="(in memory)", **fields)
        made = None
        if section.trained:
            made = KINDS[drafter.kind].build_decoder(decoder, drafter)
            made.load_weights((drafter_weights or random_drafter(drafter, seed=1)).items())
        return Drafting(section, 1 << 20, made)

    layers = drafter.aux_layers
    with catching_up(catch_up):
        return make_engine(config, weights, kernels, drafting=drafting, aux_layers=layers, **sizes)


def random_jobs(
    vocab: int,
    count: int,
    seed: int = 0,
    longest: int = 40,
    stops: Sequence[tuple[int, ...]] = (),
    turns: Sequence[int] = (),
) -> list[Job]:
    """Prompts; responses have up to `longest` tokens, or turns of any of `turns`, and end at any of `stops`, if there
    are some at strings, too.
    """
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            max_tokens=rng.randint(1, longest),
            ignore_eos=rng.random() < 0.5,
            seed=17,
        )
        if stops:
            params = replace(params, stop=rng.choice([(), (), ("a", "xy")]), stop_token_ids=rng.choice(stops))
        if turns:
            params = replace(params, max_turn_tokens=rng.choice(turns), ignore_eos=False)
        prompt = [rng.randrange(1, vocab) for _ in range(rng.randint(1, 60))]
        jobs.append((i, prompt, params, rng.randint(1, 4)))
    return jobs


def generate_all(engine: Engine, jobs: list[Job]) -> Responses:
    for prompt_id, prompt, params, n in jobs:
        engine.add(prompt, params, prompt_id, indices=range(n))
    return collect(run_out(engine))


def collect(requests: list[Request]) -> Responses:
    return {(r.prompt_id, r.sample_index): (r.output, r.logprobs) for r in requests}


class OracleDrafter:
    """Proposes the known response of each request, each token spoiled with probability `spoil`."""

    kind = "oracle"

    def __init__(self, responses: Responses, vocab: int, spoil: float, seed: int = 0):
        self.responses, self.vocab, self.spoil = responses, vocab, spoil
        self.random = random.Random(seed)
        self.live: dict[int, list[int]] = {}  # Request.order -> tokens so far

    def start(self, request: Request) -> None:
        seen = self.live.get(request.order, [])
        assert request.output[: len(seen)] == seen  # it may have been preempted
        self.live[request.order] = list(request.output)

    def sync_context(self, rows: RunningRows) -> None:
        for request in rows.requests:
            seen = self.live[request.order]
            drawn = rows.outputs[request.slot, : int(rows.output_len[request.row])].tolist()
            assert drawn[: len(seen)] == seen
            self.live[request.order] = drawn

    def finish(self, request: Request) -> None:
        seen = self.live.pop(request.order, [])
        assert seen == request.output[: len(seen)]
        known = self.responses.get((request.prompt_id, request.sample_index))
        assert known is None or request.output == known[0][: len(request.output)]

    def end_generate(self) -> None:
        assert not self.live

    def propose(self, rows: RunningRows, lengths: np.ndarray, strategy: DraftStrategy) -> Draft:
        counts, tokens, likely = [], [], []
        for row, length in enumerate(lengths.tolist()):
            request = rows.requests[row]
            done = int(rows.output_len[row])
            assert self.live[request.order] == rows.outputs[request.slot, :done].tolist()
            known = self.responses.get((request.prompt_id, request.sample_index), ([], []))[0][done:]
            kept = [p for at in range(1, length + 1) if (p := 0.7**at) >= strategy.min_cumulative_acceptance]
            counts.append(len(kept))
            tokens += [self._token(known, at) for at in range(len(kept))]
            likely += kept
        return Draft(np.array(counts, np.int32), np.array(tokens, np.int32), np.array(likely, np.float32))

    def _token(self, truth: list[int], at: int) -> int:
        if at < len(truth) and self.random.random() >= self.spoil:
            return truth[at]
        return self.random.randrange(self.vocab)

    def observe(self, draft: Draft, reached: np.ndarray, accepted: np.ndarray) -> None:
        assert len(reached) == len(accepted) == draft.num_tokens
        assert not (accepted & ~reached).any()


class RandomSelector:
    """Any length and any least acceptance, at random; sometimes plain decoding."""

    def __init__(self, kind: str, longest: int, seed: int = 0):
        self.kind, self.longest = kind, longest
        self.random = random.Random(seed)
        self.emitted = self.rows = 0

    def select(self, num_running: int) -> DraftStrategy:
        if self.random.random() < 0.2:
            return NO_DRAFT
        return DraftStrategy(self.kind, self.random.randint(1, self.longest), self.random.choice((0.0, 0.3)))

    def record(self, measurement: StepMeasurement) -> None:
        assert measurement.num_emitted >= measurement.num_running
        assert measurement.longest <= measurement.strategy.draft_len
        assert (measurement.accepted[:1] <= measurement.num_running).all()
        self.emitted += measurement.num_emitted
        self.rows += measurement.num_running


def attach(engine: Engine, drafter, selector) -> Speculator:
    """Makes a plain engine speculate with these parts."""
    scheduler, rows = engine.scheduler, engine.scheduler.rows
    unused = PreRolledDrafter(rows, len(rows.token_ids), None)
    speculator = Speculator(drafter, selector, rows, scheduler.reserve, engine.runner.tp, unused)
    engine.speculator = speculator
    return speculator


class SizedCapturer:
    """A capturer with given sizes: each step's temporary memory and each graph's own."""

    def __init__(self, temporary: dict[str, int] | int = 0, own: int = 0):
        self.pool_bytes = 0
        self.temporary, self.own = temporary, own
        self.captured = self._needed = 0

    def warm_up(self, step) -> int:
        step()
        self._needed = self.temporary if isinstance(self.temporary, int) else self.temporary[step.__name__]
        return self._needed

    def capture(self, step):
        self.captured += 1
        self.pool_bytes = max(self.pool_bytes, self._needed)
        return Captured(step, self.own)


class Late:
    """A CUDA event that is done after `polls` queries; `on_wait` gets the queries left where one waits for it."""

    def __init__(self, polls: int, on_wait: Callable[[int], None]):
        self.polls, self._on_wait = polls, on_wait

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def synchronize(self) -> None:
        self._on_wait(self.polls)


def delay_reads(monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[int], None], polls: int | None = None) -> None:
    """From now on a read is done after `polls` queries, by default `count % 4` of `count` positions."""
    start = PagedHiddenStates.start_read

    def late(pages: PagedHiddenStates, blocks: list[int], count: int) -> HostCopy:
        return HostCopy(start(pages, blocks, count).wait(), Late(count % 4 if polls is None else polls, on_wait))

    monkeypatch.setattr(PagedHiddenStates, "start_read", late)

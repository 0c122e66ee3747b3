"""A deterministic "language model" that reads its context back through block tables: wrong ones show; and environments
that are a function of what was drawn, answer when they like, and check how they are called.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.errors import DataError
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.rollout.drive import Drive
from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.speculation.build import Drafting
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import GenerateCall, Prompt, Sample, SamplingParams, TurnResult
from tests.helpers.stepping import run_out

FACTOR = np.uint64(0x9E3779B97F4A7C15)


def context_logits(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Logits float32 [V] in (-4, 4) from a hash of the whole context, order included."""
    with np.errstate(over="ignore"):
        h = (tokens.astype(np.uint64) + np.uint64(1)) * FACTOR
        h = (h ^ (h >> np.uint64(31))) + np.arange(len(h), dtype=np.uint64)
        h = (h * FACTOR) ^ (h >> np.uint64(27))
        z = (h.sum(dtype=np.uint64) + np.arange(1, vocab_size + 1, dtype=np.uint64)) * FACTOR
        z = (z ^ (z >> np.uint64(29))) * FACTOR
    return ((z >> np.uint64(40)).astype(np.float64) / 2**21 - 4).astype(np.float32)


class FakeDecoder:
    """Keeps (token, position) of every slot as its "cache"; asserts all that a decoder may rely on."""

    device = torch.device("cpu")
    kind = "fake"

    def __init__(self, vocab_size: int = 50):
        self.vocab_size = vocab_size
        self.prefilled = 0  # prompt rows computed, to show that a prompt is prefilled once
        self.steps = 0
        self.weights: dict[str, Tensor] = {}

    def new_kv_cache(self, num_blocks: int, block_size: int) -> np.ndarray:
        self.block_size = block_size
        return np.full((num_blocks, block_size, 2), -1, np.int64)

    def copy_blocks(self, kv: np.ndarray, src: list[int], dst: list[int]) -> None:
        assert len(set(dst)) == len(dst)
        kv[dst] = kv[src]

    def load_weights(self, named: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        self.weights.update(named)

    def forward(self, batch: DecoderInput, kv: np.ndarray) -> DecoderOutput:
        self.steps += 1
        arrays = (batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start, batch.context_lens)
        tokens, positions, slots, starts, lens = (a.numpy() for a in arrays)
        assert all(a.dtype == np.int32 for a in (tokens, positions, slots, starts, lens))
        assert len(set(slots.tolist())) == len(slots) == len(tokens) == starts[-1]
        flat = kv.reshape(-1, 2)
        flat[slots, 0], flat[slots, 1] = tokens, positions
        logits = []
        for row in batch.logit_rows.tolist():
            seq = int(np.searchsorted(starts, row, side="right")) - 1
            length = int(positions[row]) + 1
            assert length <= lens[seq]
            table = batch.block_tables[seq].numpy()
            at = np.arange(length)
            read = flat[table[at // self.block_size] * self.block_size + at % self.block_size]
            assert (read[:, 1] == at).all(), "the block table does not lead to this sequence's positions"
            logits.append(context_logits(read[:, 0], self.vocab_size))
        counts = np.diff(starts)
        assert ((lens - counts) == positions[starts[:-1]]).all()
        self.prefilled += int(counts[counts > 1].sum())
        out = np.stack(logits) if logits else np.zeros((0, self.vocab_size), np.float32)
        return DecoderOutput(torch.from_numpy(out), torch.zeros(len(logits), 4))


class CharTokenizer:
    """Token i is the i-th character; token 0, which texts lack, ends a response."""

    has_chat_template = True

    def __init__(self, alphabet: str = "abcdefghijklmnopqrstuvwxyz .,!?0123456789ABCDEFGHI"):
        self.alphabet = "\0" + alphabet
        self.eos_token_ids, self.end_token_id = (0,), 0
        self.vocab_size = len(self.alphabet)

    def special_id(self, text: str) -> int | None:
        return 0 if text == "<end>" else None

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(c) for c in text]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def checked(self, ids: list[int]) -> list[int]:
        return ids

    def encode_behind(self, before: str, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(self, messages: object) -> str:
        raise DataError("no conversation but the prompt's")

    def encode_chat(
        self, prompt: str | Sequence[Mapping[str, str]], system: None = None, tools: object = ()
    ) -> list[int]:
        text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
        return self.encode(f"A {text} B")

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(self.alphabet[i] for i in token_ids if i)


def fake_engine(
    num_blocks: int = 400,
    max_running: int = 8,
    budget: int = 64,
    block_size: int = 4,
    *,
    tokenizer: CharTokenizer | None = CharTokenizer(),  # noqa: B008
    eos: tuple[int, ...] = (0,),
    drafter: str | None = None,
    tp: TensorParallel | None = None,
) -> Engine:
    """An engine around a `FakeDecoder`; `drafter` needs no weights ("none", "suffix"), and drafts in every step."""
    drafting = None if drafter is None else Drafting(SpeculationSection(drafter=drafter, selector="fixed"), 1 << 20)  # type: ignore[arg-type]
    limits = SchedulerLimits(max_running, budget, 128, 50)
    sizes = (limits, num_blocks, block_size)
    return Engine(FakeDecoder(50), *sizes, tokenizer, eos_token_ids=eos, drafting=drafting, tp=tp)


def fake_backend(**options: Any) -> EmbeddedBackend:
    """The embedded backend around `fake_engine`."""
    return EmbeddedBackend(fake_engine(**options), ServedWeights({}, version=0))


PROMPTS = [Prompt(i, f"q{i}", tuple(range(3, 6 + i)), f"text {i}") for i in range(6)]
Trajectories = dict[tuple[int, int], tuple]


class FakeTurns:
    """A `TurnSource` whose results come in any order, some polls late."""

    def __init__(self, vocab: int = 50, delay: random.Random | None = None, most_turns: int = 4, longest: int = 9):
        """Each answer is held back by a random number of polls, up to four; without `delay` by none."""
        self.vocab, self.delay, self.most_turns, self.longest = vocab, delay, most_turns, longest
        self.held: list[tuple[int, TurnResult]] = []  # polls that are left
        self.live: set[tuple[int, int]] = set()
        self.seen: list[tuple[list[int], str]] = []
        self.discarded: set[tuple[int, int]] = set()
        self.waits = 0

    def answer(self, prompt_id: int, index: int, turn: int, token_ids: Sequence[int]) -> TurnResult:
        """A function of its arguments."""
        rng = random.Random(repr((prompt_id, index, turn, list(token_ids))))
        reward = rng.randrange(8) / 4
        if rng.random() < 0.05:
            return TurnResult(prompt_id, index, (), failure="timeout")
        if turn + 1 >= self.most_turns or rng.random() < 0.2:
            ended = "max_turns" if turn + 1 >= self.most_turns else "env"
            return TurnResult(prompt_id, index, (), reward, ended=ended)
        given = tuple(rng.randrange(1, self.vocab) for _ in range(rng.randint(1, self.longest)))
        return TurnResult(prompt_id, index, given, reward)

    def submit(self, prompt: Prompt, sample_index: int, turn: int, token_ids: Sequence[int], text: str) -> None:
        at = prompt.prompt_id, sample_index
        assert at not in self.live and len(token_ids)
        self.live.add(at)
        self.seen.append((list(token_ids), text))
        polls = 0 if self.delay is None else self.delay.randrange(5)
        self.held.append((polls, self.answer(*at, turn, token_ids)))

    def poll(self, timeout_s: float = 0.0) -> list[TurnResult]:
        self.waits += timeout_s > 0
        come = [result for polls, result in self.held if polls <= 0]
        self.held = [(polls - 1, result) for polls, result in self.held if polls > 0]
        if self.delay is not None:
            self.delay.shuffle(come)
        self.live -= {(r.prompt_id, r.sample_index) for r in come}
        return come

    def discard(self, prompt_id: int, sample_index: int) -> None:
        self.discarded.add((prompt_id, sample_index))
        self.live.discard((prompt_id, sample_index))
        self.held = [(p, r) for p, r in self.held if (r.prompt_id, r.sample_index) != (prompt_id, sample_index)]

    def close(self) -> None:
        assert not self.live


def trajectory(request: Request) -> tuple:
    """All that must not depend on anything but seed, policy and environment."""
    logprobs = np.float32(request.logprobs).tolist()
    return request.output, logprobs, request.given, request.turn_rewards, request.failure, request.finish_reason


def run_turns(engine: Engine, jobs, source: FakeTurns, while_parked=None) -> Trajectories:
    """All trajectories of the jobs by an engine with environments."""
    finished: list[Request] = []
    settings = {prompt_id: (params, n) for prompt_id, _, params, n in jobs}

    class Jobs:
        """The engine, where each prompt has its own parameters and number of samples."""

        def __getattr__(self, name):
            return getattr(engine, name)

        def begin(self, prompt, params, indices, begun, turns):
            params, n = settings[prompt.prompt_id]
            engine.begin(prompt, params, range(n), begun, turns)

    prompts = [Prompt(prompt_id, f"q{prompt_id}", tuple(prompt), "") for prompt_id, prompt, _, _ in jobs]
    call = GenerateCall(prompts, SamplingParams(), turns=source, while_parked=while_parked)
    Drive(Jobs(), call, engine.runner.tp, lambda r: finished.append(r) or Sample(*at(r), [], [], "", "stop", 0)).run()
    if engine.speculator is not None:
        engine.speculator.drafter.end_generate()
    assert engine.is_idle and not source.live
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert len(engine.scheduler.rows._free_slots) == engine.limits.max_running
    assert engine.scheduler.rows.num_masked == engine.scheduler.rows.num_with_stops == 0
    cut = {at(r) for r in finished if r.finish_reason == "length"}
    assert source.discarded == (cut if engine.runner.tp.rank == 0 else set())
    return {at(r): trajectory(r) for r in finished}


def at(request: Request) -> tuple[int, int]:
    return request.prompt_id, request.sample_index


def turn_by_turn(engine: Engine, jobs, source: FakeTurns) -> Trajectories:
    """The same by the definition: each turn is a request of its own, whose output begins with the stream so far."""
    found: Trajectories = {}
    for prompt_id, prompt, params, n in jobs:
        for index in range(n):
            request = _last_turn(engine, np.array(prompt, np.int32), params, prompt_id, index, source)
            found[prompt_id, index] = trajectory(request)
    return found


def _last_turn(
    engine: Engine, prompt: np.ndarray, params: SamplingParams, prompt_id: int, index: int, source: FakeTurns
) -> Request:
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else engine._eos)
    output: list[int] = []
    logprobs: list[float] = []
    given: tuple[tuple[int, int], ...] = ()
    rewards: list[float] = []
    while True:
        start = given[-1][1] if given else 0
        most = min(params.max_tokens, start + (params.max_turn_tokens or params.max_tokens))
        of_turn = replace(params, max_tokens=most, max_turn_tokens=0)
        request = Request(prompt, of_turn, prompt_id, index, 0, stops, engine._stop_finder(params))
        request.output, request.logprobs = list(output), list(logprobs)
        engine.scheduler.add(Prefill(np.concatenate((prompt, np.array(output, np.int32))), [request]))
        (request,) = run_out(engine)
        output, logprobs = request.output, request.logprobs
        request.given, request.turn_rewards = given, rewards
        if request.finish_reason == "length" and len(output) >= params.max_tokens:
            return request
        answer = source.answer(prompt_id, index, len(rewards), output[start:])
        if answer.failure is not None:
            request.failure, request.finish_reason = answer.failure, "abort"
            return request
        rewards.append(answer.reward)
        if answer.ended is not None:
            is_cut = answer.ended == "env" and request.finish_reason == "length"
            request.finish_reason = "cut" if is_cut else answer.ended
            return request
        if len(output) + len(answer.given) >= params.max_tokens:
            request.finish_reason = "length"
            return request
        given += ((len(output), len(output) + len(answer.given)),)
        output = output + list(answer.given)
        logprobs = logprobs + [0.0] * len(answer.given)

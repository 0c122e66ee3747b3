"""The C and the PyTorch drafter draft the same, whatever happens to the rows, and read their pages and tables only."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch

from megatron_tlt.drafters.decoder import DrafterDecoder
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.batch import Batch, PrefillChunk
from megatron_tlt.rollout.paged_hidden_states import PagedHiddenStates
from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.speculation.trained import TrainedDrafter
from megatron_tlt.types import DraftStrategy, SamplingParams
from tests.helpers.tiny_drafters import random_drafter
from tests.helpers.tiny_models import random_weights

CONFIG = ModelConfig("qwen3", 77, 64, 1, 4, 2, 16, 90, qk_norm=True, tie_word_embeddings=True)
SIZE, BLOCKS, WINDOW, MOST = 16, 20, 8, 5
CHAIN = DraftStrategy("trained", 5)


def make_decoder(kernels: str = "native", dtype: torch.dtype = torch.float32) -> DrafterDecoder:
    policy = build_decoder(CONFIG, dtype=dtype, kernels=kernels)
    policy.load_weights(random_weights(CONFIG))
    decoder = KINDS["eagle"].build_decoder(policy, EagleConfig.of(policy.config))
    decoder.load_weights(random_drafter(CONFIG).items())
    return decoder


class Twins:
    """One set of rows with both kinds of drafter; every draft is compared."""

    def __init__(self, seed: int = 0, blocks: int = BLOCKS):
        self.random = np.random.default_rng(seed)
        self.rows = RunningRows(MOST, 64, blocks, CONFIG.vocab_size, max_output=128)
        self.pages = PagedHiddenStates(MOST * blocks, SIZE, CONFIG.hidden_size)
        make = partial(TrainedDrafter, rows=self.rows, pages=self.pages, catch_up=WINDOW)
        self.native, self.torch = (make(make_decoder(kernels)) for kernels in ("native", "torch"))
        self.free = [list(range(i * blocks, (i + 1) * blocks)) for i in range(MOST)]
        for own in self.free:
            self.random.shuffle(own)

    def feed(self, blocks: list[int], start: int, end: int) -> None:
        """The policy computed these positions."""
        numbers = self.random.standard_normal((end - start, CONFIG.hidden_size)).astype(np.float32)
        slots = torch.tensor([blocks[p // SIZE] * SIZE + p % SIZE for p in range(start, end)])
        self.pages.write(slots, torch.from_numpy(numbers))

    def request(self, order: int, prompt: int, max_tokens: int = 60, temperature: float = 0.8) -> Request:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=4)
        tokens = self.random.integers(0, CONFIG.vocab_size, prompt).astype(np.int32)
        request = Request(tokens, params, order, 0, order, frozenset())
        request.output, request.logprobs = [order], [0.0]
        return request

    def start(self, request: Request, chunks: tuple[int, ...] = ()) -> None:
        """Prefills it in chunks that end at `chunks` and at its end, then gives it a row."""
        cached, blocks = len(request.prompt) + len(request.output) - 1, self.free.pop()
        tokens = np.concatenate((request.prompt, np.array(request.output[:-1], np.int32)))
        prefill = Prefill(tokens, [request], True, blocks[: cached // SIZE + 1])
        bounds = [0, *chunks, cached]
        for start, end in pairwise(bounds):
            self.feed(blocks, start, end)
            for drafter in (self.native, self.torch):
                drafter.feed_chunks(Batch(0, [PrefillChunk(prefill, start, end)]))
        self.rows.start(request, blocks, cached, blocks[cached // SIZE] * SIZE + cached % SIZE)
        for drafter in (self.native, self.torch):
            drafter.start(request)

    def stop(self, request: Request) -> None:
        blocks = self.rows.block_tables[request.row].tolist()
        self.rows.stop(request)
        self.free.append(blocks)

    def propose(self, lengths: list[int] | np.ndarray, strategy: DraftStrategy = CHAIN) -> Draft:
        wanted = np.asarray(lengths, np.int32)
        a, b = (d.propose(self.rows, wanted, strategy) for d in (self.native, self.torch))
        np.testing.assert_array_equal(a.counts, b.counts)
        assert a.tokens.dtype == b.tokens.dtype
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.cumulative_acceptance, b.cumulative_acceptance, atol=0.05)
        return a

    def advance(self, counts: list[int] | np.ndarray) -> None:
        counts = np.asarray(counts, np.int32)
        total = int(counts.sum())
        for row, count in enumerate(counts.tolist()):
            root = int(self.rows.positions[row])
            self.feed(self.rows.block_tables[row].tolist(), root, root + count)
        tokens = self.random.integers(0, CONFIG.vocab_size, total).astype(np.int32)
        self.rows.advance_many(tokens, np.zeros(total, np.float32), counts, SIZE)


def test_drafts_are_the_same() -> None:
    """Requests come, go, draft or not, and fall behind by more than the window."""
    twins = Twins()
    running: list[Request] = []
    drafted = late = 0
    for step in range(60):
        if len(running) < MOST and step % 4 == 0:
            running.append(twins.request(step, 3 + step, 60 if step < 20 else 90, 0.8 * (step % 8 > 0)))
            twins.start(running[-1], (1, 2) if step % 3 else ())
        if step % 9 == 8:
            twins.stop(running.pop(step % len(running)))
        running = [r for r in running if twins.rows.output_len[r.row] < 50 or twins.stop(r)]
        count = len(running)
        lengths = twins.random.integers(0, CHAIN.draft_len + 1, count)
        if step % 10 > 6:
            lengths[:] = 0  # plain decoding
        drafted += twins.propose(lengths).num_tokens
        late += int((twins.native._first > 1).sum())
        twins.advance(twins.random.integers(1, 5, count))
    assert drafted > 200 and late


def test_drafts_do_not_depend_on_how_the_prompt_came() -> None:
    """In one chunk or several, alone or beside others: the same pairs, at the same slots."""
    drafts = []
    for chunks in ((), (1,), (3, 4, 17), (16, 32)):
        twins = Twins(seed=3)
        request = twins.request(0, 40)
        twins.start(request, chunks)
        table = twins.rows.block_tables[0].tolist()
        slots = [table[p // SIZE] * SIZE + p % SIZE for p in range(40)]
        drafts.append((twins.pages.data[slots], twins.native.kv.data.clone()))
        assert twins.propose([5]).num_tokens > 0
    for states, cache in drafts[1:]:
        assert torch.equal(states, drafts[0][0]) and torch.equal(cache, drafts[0][1])

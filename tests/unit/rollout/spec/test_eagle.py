"""Drafts in one call from the rows are those of the array path, bit for bit, whatever befalls the rows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.errors import BackendError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.native import NativeDecoder
from megatron_tlt.models.native_eagle import NativeEagle
from megatron_tlt.models.native_pairs import native_pairs
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.rows import RunningRows
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.eagle import EagleDrafter
from megatron_tlt.types import DraftStrategy, SamplingParams
from tests.helpers.pairs import eagle_weights
from tests.helpers.tiny_models import random_weights

CONFIG = ModelConfig("qwen3", 77, 64, 1, 4, 2, 16, 90, qk_norm=True, tie_word_embeddings=True)
SIZE, BLOCKS, WINDOW, MOST = 16, 20, 8, 5
CHAIN = DraftStrategy("eagle", 5)
TREE = DraftStrategy("eagle", 4, 3)


class ByArrays:
    """A decoder that is not seen to be native."""

    def __init__(self, decoder: NativeEagle):
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def make_decoder(dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> NativeEagle:
    policy = NativeDecoder(config, dtype)
    policy.load_weights(random_weights(config))
    decoder = NativeEagle(policy)
    decoder.load_weights(eagle_weights(config))
    return decoder


class Twins:
    """One set of rows, followed by both kinds of drafter; every draft is compared."""

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        want_probs: bool = False,
        blocks: int = BLOCKS,
    ):
        self.random, self.dtype, self.blocks = np.random.default_rng(seed), dtype, blocks
        self.rows = RunningRows(MOST, 64, blocks, CONFIG.vocab_size)
        self.decoder = make_decoder(dtype)
        make = partial(EagleDrafter, rows=self.rows, num_blocks=MOST * blocks, block_size=SIZE)
        make = partial(make, hidden_size=CONFIG.hidden_size, window=WINDOW, want_probs=want_probs)
        self.native, self.arrays = make(self.decoder), make(ByArrays(self.decoder))
        self.free = [list(range(i * blocks, (i + 1) * blocks)) for i in range(MOST)]
        for own in self.free:
            self.random.shuffle(own)

    def states(self, count: int) -> torch.Tensor:
        numbers = self.random.standard_normal((count, CONFIG.hidden_size)).astype(np.float32)
        return torch.from_numpy(numbers).to(self.dtype)

    def request(self, order: int, prompt: int, max_tokens: int = 60, temperature: float = 0.8) -> Request:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=4)
        request = Request(np.zeros(prompt, np.int32), params, order, 0, order, frozenset())
        request.output, request.logprobs = [order], [0.0]
        return request

    def start(self, request: Request, carry: bool = True) -> None:
        cached, blocks = len(request.prompt) + len(request.output) - 1, self.free.pop()
        self.rows.start(request, blocks, cached, blocks[cached // SIZE] * SIZE + cached % SIZE)
        state = self.states(1)[0] if carry else None
        for drafter in (self.native, self.arrays):
            request.carry = state
            drafter.start(request)

    def stop(self, request: Request) -> None:
        blocks = self.rows.block_tables[request.row].tolist()
        self.rows.stop(request)
        self.free.append(blocks)

    def propose(self, lengths: list[int] | np.ndarray, strategy: DraftStrategy = CHAIN) -> Draft:
        wanted = np.asarray(lengths, np.int32)
        a, b = (d.propose(self.rows, wanted, strategy) for d in (self.native, self.arrays))
        np.testing.assert_array_equal(a.counts, b.counts)
        assert a.num_nodes == b.num_nodes
        optional = ("parents", "feature", "probs") if a.num_nodes else ()
        for name in ("counts", "tokens", "survival", "depths", *optional):
            one, two = getattr(a, name), getattr(b, name)
            assert (one is None) == (two is None)
            if one is not None:
                assert one.dtype == two.dtype, name
                np.testing.assert_array_equal(one, two, err_msg=name)
        assert torch.equal(self.native.kv.data, self.arrays.kv.data)
        return a

    def advance(self, counts: list[int] | np.ndarray) -> None:
        counts = np.asarray(counts, np.int32)
        total = int(counts.sum())
        hidden = self.states(total)
        for drafter in (self.native, self.arrays):
            drafter.take_hidden(self.rows, counts, hidden)
        tokens = self.random.integers(0, CONFIG.vocab_size, total).astype(np.int32)
        self.rows.advance_many(tokens, np.zeros(total, np.float32), counts, SIZE)


@pytest.mark.parametrize("want_probs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_are_the_same(strategy: DraftStrategy, dtype: torch.dtype, want_probs: bool) -> None:
    """Requests come, go, draft or not, fall behind by more than the window, and outgrow the output buffer."""
    if want_probs and strategy.topk > 1:
        strategy = CHAIN  # block verification takes chains
    twins = Twins(int(want_probs), dtype, want_probs)
    running: list[Request] = []
    drafted = late = 0
    for step in range(60):
        if len(running) < MOST and step % 4 == 0:
            running.append(twins.request(step, 3 + step, 60 if step < 20 else 90, 0.8 * (step % 8 > 0)))
            twins.start(running[-1], carry=step % 3 > 0)
        if step % 9 == 8:
            twins.stop(running.pop(step % len(running)))
        running = [r for r in running if twins.rows.output_len[r.row] < 50 or twins.stop(r)]
        count = len(running)
        lengths = twins.random.integers(0, strategy.draft_len + 1, count)
        if step % 10 > 6:
            lengths[:] = 0  # plain decoding
        drafted += twins.propose(lengths, strategy).num_nodes
        late += int((twins.native._first > 1).sum())
        twins.advance(twins.random.integers(1, 5, count))
    assert drafted > 200 and late
    assert twins.rows.outputs.shape[1] == 90


def test_a_row_without_new_pairs_is_left_out() -> None:
    """Nobody fed its prompt: the hidden state before its first token is unknown."""
    twins = Twins()
    for order in range(3):
        twins.start(twins.request(order, 5), carry=order != 1)
    assert (twins.propose([3, 3, 3]).counts > 0).tolist() == [True, False, True]
    twins.advance([1, 1, 1])
    assert (twins.propose([0, 2, 0]).counts > 0).tolist() == [False, True, False]
    twins.advance([2, 2, 2])
    assert twins.propose([0, 0, 0]).num_nodes == 0
    only = Twins()
    only.start(only.request(0, 5), carry=False)
    for strategy in (CHAIN, TREE):
        assert only.propose([4], strategy).counts.tolist() == [0]


def test_hidden_states_of_rows_as_they_were() -> None:
    """A backlog tells of several steps at once, of rows that have advanced since."""
    together, single = Twins(seed=1), Twins(seed=1)
    for twins in (together, single):
        for order in range(3):
            twins.start(twins.request(order, 4 + order))
    rows = together.rows
    then = SimpleNamespace(num_rows=3, slots=rows.slots[:3].copy(), positions=rows.positions[:3].copy())
    states = []
    for _ in range(4):
        single.advance([1, 1, 1])
        states.append(together.states(3))
        tokens = together.random.integers(0, CONFIG.vocab_size, 3).astype(np.int32)
        rows.advance_many(tokens, np.zeros(3, np.float32), np.ones(3, np.int32), SIZE)
    hidden = torch.stack(states, 1).flatten(0, 1)
    for drafter in (together.native, together.arrays):
        drafter.take_hidden(then, np.full(3, 4, np.int32), hidden)
    for drafter in (together.arrays, single.native, single.arrays):
        assert torch.equal(together.native._ring, drafter._ring)
    assert (together.propose([3] * 3).tokens == single.propose([3] * 3).tokens).all()


def test_more_states_than_the_window_holds() -> None:
    twins = Twins()
    twins.start(twins.request(0, 4))
    hidden = twins.states(2 * WINDOW + 3)
    twins.native.take_hidden(twins.rows, np.array([len(hidden)], np.int32), hidden)
    at = [(4 + i) % WINDOW for i in range(len(hidden) - WINDOW + 1, len(hidden) + 1)]
    slot = int(twins.rows.slots[0])
    assert torch.equal(twins.native._ring[slot * WINDOW : (slot + 1) * WINDOW][at], hidden[-WINDOW:])


def test_positions_beyond_the_first_rotary_table() -> None:
    twins = Twins(blocks=270)
    assert CONFIG.max_position_embeddings > 4200
    twins.start(twins.request(0, 4090))
    for _ in range(6):
        assert twins.propose([4]).counts.tolist() == [4]
        twins.advance([2])


def test_wrong_input_is_refused() -> None:
    twins = Twins()
    twins.start(twins.request(0, 5))
    native, rows = twins.native, twins.rows
    ones, hidden = np.ones(1, np.int32), twins.states(1)
    for wrong in (hidden.bfloat16(), hidden[:, :9], twins.states(2)[:, ::2], twins.states(2)):
        with pytest.raises(BackendError, match="hidden states"):
            native.take_hidden(rows, ones, wrong)
    many = SimpleNamespace(slots=np.zeros(MOST + 1, np.int32), positions=np.zeros(MOST + 1, np.int32))
    with pytest.raises(BackendError, match="rows advance"):
        native.take_hidden(many, np.ones(MOST + 1, np.int32), twins.states(MOST + 1))
    many.slots[0] = MOST
    with pytest.raises(BackendError, match="hidden states"):
        native.take_hidden(many, ones, hidden)
    with pytest.raises(BackendError, match="drafts for"):
        native.propose(rows, np.ones(MOST + 1, np.int32), CHAIN)
    with pytest.raises(BackendError, match="1 to 4"):
        native.propose(rows, ones, DraftStrategy("eagle", 2, 5))
    rows.block_tables[0, 0] = MOST * BLOCKS
    with pytest.raises(BackendError, match="slot outside"):
        native.propose(rows, ones, CHAIN)
    rows.block_tables[0, 0] = 0
    rows.outputs[int(rows.slots[0]), 0] = CONFIG.vocab_size
    with pytest.raises(BackendError, match="token id"):
        native.propose(rows, ones, CHAIN)
    rows.outputs = rows.outputs.astype(np.int64)
    with pytest.raises(BackendError, match="outputs must be"):
        native.propose(rows, ones, CHAIN)


def test_arrays_that_c_cannot_read_are_refused() -> None:
    decoder, rows = make_decoder(), RunningRows(MOST, 64, BLOCKS, CONFIG.vocab_size)
    rows.block_tables = np.asfortranarray(rows.block_tables)
    with pytest.raises(BackendError, match="block_tables must be contiguous"):
        EagleDrafter(decoder, rows, BLOCKS, SIZE, CONFIG.hidden_size, WINDOW)
    rows = RunningRows(MOST, 64, BLOCKS, CONFIG.vocab_size)
    with pytest.raises(BackendError, match="hidden states"):
        EagleDrafter(decoder, rows, BLOCKS, SIZE, CONFIG.hidden_size + 1, WINDOW)


def test_other_decoders_take_the_long_way() -> None:
    assert native_pairs(ByArrays(make_decoder()), *[None] * 4) is None

"""Coupled verification of chains against a loop; a step's waits for the device and its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.backends.vllm.plugin import compat, keyed
from megatron_tlt.backends.vllm.plugin.keyed import KeyedSampling, follow
from megatron_tlt.errors import BackendError


def by_hand(tokens: list[int], drafts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """What each request emits, and how many of its drafted tokens that accepts."""
    emitted, accepted, at = [], [], 0
    for draft in drafts:
        n = 0
        while n < len(draft) and draft[n] == tokens[at + n]:
            n += 1
        emitted.append(tokens[at : at + n + 1])
        accepted.append(n)
        at += len(draft) + 1
    return emitted, accepted


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_followed_as_far_as_it_agrees(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 5, size=random.integers(1, 9))
    drafts = [random.integers(0, 3, n).tolist() for n in counts]
    tokens = random.integers(0, 3, int((counts + 1).sum()))
    flat = np.array([t for draft in drafts for t in draft], np.int64)
    out, accepted = follow(tokens, counts, flat)
    emitted, expected = by_hand(tokens.tolist(), drafts)
    assert out.dtype == np.int32
    assert out.shape == (len(counts), counts.max() + 1)
    assert [row[row >= 0].tolist() for row in out] == emitted
    assert accepted.tolist() == expected


VOCAB = 50


class Runner:
    """What the sampler reads of a model runner: requests with `drawn` tokens of output behind a prompt that ends with
    `start` tokens of their responses.
    """

    device = "cpu"

    def __init__(self, names: list[str], start: int = 0, drawn: int = 1) -> None:
        extra = {keyed.ARGUMENT: [7, 1.0, 0, 1.0, 0.0, 0, start]}
        params = SimpleNamespace(extra_args=extra)
        self.requests = {name: SimpleNamespace(sampling_params=params) for name in names}
        lengths = {"num_tokens_no_spec": np.full(len(names), 3 + drawn), "num_prompt_tokens": np.full(len(names), 3)}
        self.input_batch = SimpleNamespace(num_reqs=len(names), req_ids=names, **lengths)
        self._sample: Any = None


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of fp32 logits that the sampler was given; it is PyTorch's."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(keyed, "_native_sample", lambda device: None)
    monkeypatch.setattr(compat, "sampler_output", lambda tokens: tokens)
    sample = keyed.Sampler.sample

    def noted(self: Any, logits: torch.Tensor, rows: Any) -> Any:
        shapes.append(tuple(logits.shape))
        return sample(self, logits, rows)

    monkeypatch.setattr(keyed.Sampler, "sample", noted)
    return shapes


def verify(drafts: list[list[int]], start: int = 0, drawn: int = 1) -> torch.Tensor:
    """The tokens [B, K + 1] of a step that verifies `drafts`, of random bf16 logits."""
    runner, rows = Runner([str(i) for i in range(len(drafts))], start, drawn), sum(map(len, drafts)) + len(drafts)
    flat = torch.tensor([t for draft in drafts for t in draft], dtype=torch.int32)
    metadata = SimpleNamespace(num_draft_tokens=[len(draft) for draft in drafts], draft_token_ids=flat)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)).bfloat16()
    KeyedSampling(runner)
    tokens: torch.Tensor = runner._sample(logits, metadata)
    return tokens


def test_chunks_draw_the_same_tokens_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, sampled: list[tuple[int, ...]]
) -> None:
    drafts = [[1, 2, 3], [], [4], [5, 6, 7, 8]]
    whole = verify(drafts)
    assert sampled == [(12, VOCAB)]
    monkeypatch.setattr(keyed, "FP32_AT_ONCE", 5 * VOCAB + 1)
    sampled.clear()
    assert torch.equal(verify(drafts), whole)
    assert sampled == [(5, VOCAB), (5, VOCAB), (2, VOCAB)]


def test_noise_is_of_the_place_in_the_whole_response(sampled: list[tuple[int, ...]]) -> None:
    """Earlier turns are in the prompt of a request."""
    drafts = [[1, 2, 3], [], [4]]
    assert torch.equal(verify(drafts, start=9), verify(drafts, drawn=10))
    assert not torch.equal(verify(drafts, start=9), verify(drafts))


def test_a_verifying_step_waits_for_the_device_once_and_copies_its_tokens_up_once(
    monkeypatch: pytest.MonkeyPatch, sampled: list[tuple[int, ...]]
) -> None:
    moves: list[str] = []
    cpu, upload, to = torch.Tensor.cpu, keyed.upload, torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moves.append("down") or cpu(self))
    monkeypatch.setattr(keyed, "upload", lambda *of: moves.append("up") or upload(*of))
    zeros = torch.zeros(40, dtype=torch.int32)
    monkeypatch.setattr(keyed.Sampler, "sample", lambda self, logits, rows: (zeros[: len(logits)], None))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *of, **k: moves.append("to") or to(self, *of, **k))
    out = verify([[0, 0], [1]] * 8)
    assert moves == ["down", "up", "to"], "the copy of `upload`"
    assert out.tolist() == [[0, 0, 0], [0, -1, -1]] * 8


def test_pytorch_draws_where_the_sampler_in_c_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a compiler that is too old, which an engine's process finds at its start."""

    def refuse() -> None:
        raise BackendError("gcc cannot build it:\nerror: unknown type")

    monkeypatch.setattr(keyed, "library", refuse)
    assert keyed._native_sample(torch.device("cpu")) is None
    assert [record.getMessage() for record in caplog.records] == [
        "PyTorch draws the tokens, slower: gcc cannot build it:"
    ]

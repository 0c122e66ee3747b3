"""(E(token t + 1), hidden state t) -> hidden state t + 1: an exact drafter is always accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_tlt.drafter.buffer import HiddenStateBuffer
from megatron_tlt.drafter.measure import MeasuredAcceptance, measure
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.types import HiddenStateSample
from tests.helpers.hidden_states import imitable_chunk, imitable_policy
from tests.helpers.tiny_drafters import FAMILIES

CONFIG = FAMILIES["qwen3"]
STEPS = 4


@pytest.fixture(scope="module")
def responses() -> tuple[EagleModel, tuple[torch.Tensor, torch.Tensor], list[HiddenStateSample]]:
    drafter = EagleModel(CONFIG)
    tables = imitable_policy(CONFIG, drafter)
    shapes = ((40, 6), (25, 3), (70, 20), (9, 2))
    chunks = [
        imitable_chunk(drafter, *tables, n, p, key=77 + i, prompt_id=i) for i, (n, p) in enumerate(shapes)
    ]
    return drafter, tables, chunks


def num_drawn(chunks) -> int:
    """Response tokens that a draft may predict."""
    return sum(c.trajectory.length - max(2, c.trajectory.response_start) for c in chunks)


def acceptance(drafter: EagleModel, tables, chunks, window: int = 512) -> MeasuredAcceptance:
    """What drafts are worth on the responses, as they come out of the buffer."""
    buffer = HiddenStateBuffer(1 << 30, window, max_age=0, seed=0)
    buffer.begin_step(0)
    for chunk in chunks:
        buffer.add(chunk)
    sequences = []
    while sum(s.num_bases for s in sequences) < num_drawn(chunks):
        sequences += buffer.sample(window) or []
    options = {"steps": STEPS, "temperature": 1.0, "batch_tokens": 512, "window": 512}
    return measure(drafter, *tables, sequences, **options)


@pytest.mark.parametrize("window", [512, 16])
def test_an_exact_drafter_is_always_accepted(responses, window: int) -> None:
    drafter, tables, chunks = responses
    got = acceptance(drafter, tables, chunks, window)
    assert got.overlap == pytest.approx([1.0] * STEPS, abs=1e-4)
    assert got.coupled == [1.0] * STEPS
    assert got.bases == num_drawn(chunks)


@pytest.mark.parametrize("shift", [1, -1])
def test_hidden_states_of_the_neighbour_break_it(responses, shift: int) -> None:
    """(E(token t), hidden state t), the online trainer's slip in TLT's code, and its mirror image."""
    drafter, tables, chunks = responses
    moved = [replace(c, hidden=c.hidden.roll(shift, 0)) for c in chunks]
    got = acceptance(drafter, tables, moved)
    assert max(got.overlap) < 0.6
    assert got.coupled[0] < 0.6

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.training.batching import bases_by_step, collate, epoch, group_by_length, windows
from tests.helpers.tiny_drafters import FAMILIES, random_sequence

CONFIG = FAMILIES["qwen3"]


def numbered(length: int, prompt_len: int):
    """Token and hidden state i are those of position i."""
    s = random_sequence(CONFIG, length, prompt_len)
    s.token_ids = torch.arange(length)
    s.hidden = torch.arange(length - 1.0)[:, None].expand(-1, CONFIG.hidden_size)
    return s


@pytest.mark.parametrize(("length", "prompt_len", "size"), [(100, 10, 32), (65, 40, 32), (33, 2, 32), (300, 1, 17)])
def test_windows_hold_every_base_once_at_its_position(length: int, prompt_len: int, size: int) -> None:
    whole = numbered(length, prompt_len)
    bases = []
    for window in windows(whole, size):
        assert window.length <= size
        assert torch.equal(window.token_ids, torch.arange(window.offset, window.offset + window.length))
        assert window.hidden[0, 0] == window.offset
        assert len(window.hidden) >= window.length - 1
        bases += [window.offset + window.first_base + i for i in range(window.num_bases)]
    assert bases == list(range(whole.first_base, length - 1))


def test_given_tokens_are_context() -> None:
    """A draft begins where the next token was drawn, and ends before a given one."""
    whole, other = numbered(60, 5), numbered(30, 3)
    for begin, end in ((12, 20), (33, 34), (50, 60)):
        whole.drawn[begin:end] = False
    layout, size = PairLayout(collate([other, whole])), other.length
    for step in range(4):
        rows = layout.bases[layout.existing(step)]
        found = (rows[rows >= size] - size).tolist()
        assert found == [s for s in range(1, 59 - step) if whole.drawn[s + 1 : s + step + 2].all()]
        assert len(found) == bases_by_step([whole], 4)[step]
        assert (layout.valid(step).nonzero()[:, 0] == layout.existing(step)).all()
    found = []
    for window in windows(whole, 10):
        assert window.num_bases
        layout = PairLayout(collate([window]))
        found += layout.positions[layout.bases[layout.existing(0)]].tolist()
    assert found == [s for s in range(1, 59) if whole.drawn[s + 1]]


def test_packs_keep_the_padded_budget() -> None:
    sequences = [numbered(n, 2) for n in (50, 10, 30, 90, 12, 31)]
    groups = group_by_length(sequences, 64)
    assert sorted(s.length for g in groups for s in g) == [10, 12, 30, 31, 50, 90]
    assert all(len(g) == 1 or len(g) * max(s.length for s in g) <= 64 for g in groups)
    assert len(groups) == 4


def test_an_epoch_has_every_usable_sequence_once_in_a_seeded_order() -> None:
    sequences = [numbered(n, 4) for n in range(4, 40)]  # the first has no response token to predict
    first, again, other = (
        [[s.length for s in group] for group in epoch(sequences, 100, 64, np.random.default_rng(seed))]
        for seed in ((1, 0), (1, 0), (1, 1))
    )
    assert sorted(n for group in first for n in group) == list(range(5, 40))
    assert first == again != other

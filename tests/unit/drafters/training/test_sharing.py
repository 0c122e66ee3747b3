"""What replicas give each other: whole responses, in turns, within a bound."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.drafters.training.buffer import HiddenStateBuffer
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from tests.helpers.tiny_drafters import FAMILIES, random_chunk

CONFIG = FAMILIES["llama"]
MIB = 1 << 20


def buffer(lengths, version: int = 0, first: int = 0) -> HiddenStateBuffer:
    b = HiddenStateBuffer(64 * MIB, 64, 1, 0)
    b.begin_step(version)
    for i, length in enumerate(lengths):
        b.add(random_chunk(CONFIG, length, first + i, version))
    return b


def size_of(length: int) -> int:
    return 8 * length + 4 * CONFIG.hidden_size * (length - 1)


def test_the_longest_responses_of_the_step_are_given_whole() -> None:
    b = buffer([9, 30, 12, 25])
    b.begin_step(1)
    for i, length in enumerate((7, 40, 20)):
        b.add(random_chunk(CONFIG, length, 10 + i, 1))
    responses = dict(b.longest(MIB))
    assert [key[0] for key in responses] == [1, 1, 1]
    assert [s.length for s in responses.values()] == [40, 20, 7]
    assert [s.length for _, s in b.longest(size_of(40) + size_of(20))] == [40, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_was_sent(dtype: torch.dtype) -> None:
    b = HiddenStateBuffer(64 * MIB, 64, 1, 0)
    b.begin_step(3)
    for i, length in enumerate((9, 30, 12)):
        chunk = random_chunk(CONFIG, length, i, 3)
        b.add(replace(chunk, hidden=chunk.hidden.to(dtype)))
    room = int(b.metrics()["bytes"]) - 100
    sent = b.longest(room)
    assert len(sent) == 3 and sum(s.token_ids.nbytes + s.hidden.nbytes for _, s in sent) <= room
    arrived = pickle.loads(pickle.dumps(sent))
    assert [key for key, _ in arrived] == [key for key, _ in sent]
    for (_, mine), (_, theirs) in zip(sent, arrived, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids) and torch.equal(mine.hidden, theirs.hidden)
        assert theirs.hidden.dtype == dtype
        names = ("offset", "key", "response_start", "first_base", "num_bases")
        assert all(getattr(mine, name) == getattr(theirs, name) for name in names)
        assert theirs.hidden.untyped_storage().nbytes() == theirs.hidden.nbytes


@pytest.mark.parametrize(
    ("replicas", "mib", "count"),
    [(2, 1, 1), (2, 4, 1), (2, 64, 2), (3, 16, 3), (7, 8, 2), (7, 15, 3), (7, 64, 4), (512, 4, 1), (512, 64, 4)],
)
def test_senders_take_turns_and_bytes_are_bounded(replicas: int, mib: int, count: int) -> None:
    sharing = HiddenStateSharing(0, replicas, 1, mib * MIB)
    turns = [sharing.senders(turn) for turn in range(replicas)]
    assert all(len(set(turn)) == len(turn) == count and max(turn) < replicas for turn in turns)
    counted = [sum(r in turn for turn in turns) for r in range(replicas)]
    assert max(counted) == min(counted) == count
    assert sharing.bytes // count >= min(mib, 4) * MIB  # a sender has enough for something long


def test_the_first_rank_of_a_sending_replica_broadcasts() -> None:
    """Two of three replicas of two ranks each send; this one is the third and takes what they give."""
    sources, sent = [], buffer([9]).longest(MIB)

    def broadcast(value: object, source: int) -> object:
        sources.append((value, source))
        return sent

    mine = buffer([12], first=1)
    HiddenStateSharing(2, 3, 2, 8 * MIB).exchange(SimpleNamespace(broadcast_object=broadcast), mine, 0)
    assert sources == [(None, 0), (None, 2)]
    assert sorted(key[1] for key in mine._entries) == [0, 1]

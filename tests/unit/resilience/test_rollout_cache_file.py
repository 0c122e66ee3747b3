"""Banked answers as files: what is written comes back, what is torn or altered does not."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_tlt.resilience.rollout_cache_file import encode, encode_header, prompt_sum, read_file
from megatron_tlt.resilience.rollout_cache_writer import RolloutCacheWriter
from megatron_tlt.types import Prompt, Sample

KEY = {"weights": "abc", "stop": ["x"], "temperature": 1.0}
PROMPTS = [Prompt(i, f"q{i}", (1, 2, i), "?") for i in range(4)]
SUMS = {p.prompt_id: prompt_sum(p) for p in PROMPTS}


def answer(prompt_id: int, index: int, length: int = 3, text: str = "ab\u00e9\U0001f600\udcff") -> Sample:
    """Log-probs as the engine has them: float32 numbers."""
    rng = np.random.default_rng((prompt_id, index))
    logprobs = (-rng.random(length)).astype(np.float32).tolist()
    tokens = rng.integers(0, 2**31 - 1, length).tolist()
    return Sample(prompt_id, index, tokens, logprobs, text, ("stop", "length")[index % 2], 7)


ANSWERS = [answer(p, i, length) for p, i, length in ((0, 0, 3), (0, 5, 1), (2, 1, 40), (3, 0, 2))]
EXPECTED = {(s.prompt_id, s.sample_index): s for s in ANSWERS}


def content() -> bytes:
    return encode_header(KEY) + b"".join(encode(s, SUMS[s.prompt_id]) for s in ANSWERS)


def read(path: Path, data: bytes, prompts: dict[int, int] = SUMS) -> dict[tuple[int, int], Sample] | None:
    path.write_bytes(data)
    return read_file(path, KEY, prompts, 7)


def test_answers_come_back_bit_for_bit(tmp_path: Path) -> None:
    assert read(tmp_path / "a", content()) == EXPECTED
    assert read(tmp_path / "a", content(), {2: SUMS[2]}) == {(2, 1): EXPECTED[2, 1]}


def test_a_file_torn_anywhere_gives_the_whole_records_before(tmp_path: Path) -> None:
    whole, seen = content(), set()
    for length in range(len(whole)):
        found = read(tmp_path / "a", whole[:length]) or {}
        assert found.items() <= EXPECTED.items()
        seen.add(len(found))
    assert seen == {0, 1, 2, 3}


def test_a_flipped_bit_anywhere_never_gives_another_answer(tmp_path: Path) -> None:
    whole = content()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        found = read(tmp_path / "a", bytes(altered))
        assert found is None or found.items() < EXPECTED.items(), place


def test_another_key_or_another_question_under_the_same_id_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content())
    assert read_file(path, {**KEY, "weights": "abd"}, SUMS, 7) is None
    assert read_file(path, {**KEY, "more": 1}, SUMS, 7) is None
    other = {**SUMS, 0: prompt_sum(Prompt(0, "q0", (9, 9), "?"))}
    assert set(read_file(path, KEY, other, 7) or {}) == {(2, 1), (3, 0)}


@pytest.mark.parametrize("data", [b"", b"junk", b"TLTBANK1", os.urandom(4096), b"\x80\x04cos\nsystem\n"])
def test_a_foreign_file_is_none(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path / "a", data) is None


def test_the_writer_writes_privately_and_in_order(tmp_path: Path) -> None:
    writer, path = RolloutCacheWriter(0.01, 1 << 20), tmp_path / "bank/step-000001/replica.bank"
    writer.begin(path, KEY)
    writer.flush()
    assert not (tmp_path / "bank").exists()  # no answer yet
    for sample in ANSWERS:
        writer.add(sample, SUMS[sample.prompt_id])
    writer.flush()
    assert path.read_bytes() == content()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)}
    assert modes == {"replica.bank": 0o600, "step-000001": 0o700, "bank": 0o700}
    writer.remove(path.parent)
    writer.close()
    writer.close()
    assert not path.parent.exists()


def test_adding_never_waits_for_the_disk_and_every_record_is_synced(tmp_path: Path) -> None:
    may_go_on, syncs = threading.Event(), []

    def slow(fd: int) -> None:
        assert may_go_on.wait(30)
        syncs.append(os.fstat(fd).st_size)

    writer, path = RolloutCacheWriter(0.0, 1 << 20, slow), tmp_path / "s/replica.bank"
    writer.begin(path, KEY)
    for sample in ANSWERS:
        writer.add(sample, SUMS[sample.prompt_id])  # returns, though the thread hangs in its first fsync
    assert not syncs
    may_go_on.set()
    writer.end()
    writer.close()
    assert syncs[-1] == path.stat().st_size == len(content())


def test_what_is_written_last_is_synced_without_another_answer(tmp_path: Path) -> None:
    synced = threading.Event()
    writer = RolloutCacheWriter(0.02, 1 << 20, lambda fd: synced.set())
    writer.begin(tmp_path / "s/replica.bank", KEY)
    writer.add(ANSWERS[0], 0)
    assert synced.wait(30)
    writer.close()


def test_a_full_budget_stops_banking_until_a_step_is_removed(tmp_path: Path) -> None:
    size = len(encode_header(KEY)) + len(encode(ANSWERS[0], 0))
    writer = RolloutCacheWriter(1.0, size + 8)
    first, second = tmp_path / "1/a", tmp_path / "2/a"
    writer.begin(first, KEY)
    for sample in ANSWERS[:2]:
        writer.add(sample, 0)
    writer.flush()
    assert first.stat().st_size == size
    writer.remove(first.parent)
    writer.begin(second, KEY)
    writer.add(ANSWERS[0], 0)
    writer.close()
    assert second.stat().st_size == size
    assert writer.failure is None


def test_a_budget_too_small_for_the_next_header_ends_nothing(tmp_path: Path) -> None:
    size = len(encode_header(KEY)) + len(encode(ANSWERS[0], 0))
    writer = RolloutCacheWriter(1.0, size + 1)
    for step in range(3):
        writer.begin(tmp_path / f"{step}/a", KEY)
        writer.add(ANSWERS[0], 0)
        writer.add(ANSWERS[1], 0)
    writer.flush()
    assert writer.failure is None
    writer.remove(tmp_path / "0")
    writer.begin(tmp_path / "9/a", KEY)
    writer.add(ANSWERS[0], 0)
    writer.close()
    assert (tmp_path / "9/a").stat().st_size == size


def test_a_mistake_of_the_writer_does_not_hang_the_run(tmp_path: Path) -> None:
    writer = RolloutCacheWriter(1.0, 1 << 20)
    writer.begin(tmp_path / "1/a", KEY)
    writer.add(object(), 0)  # type: ignore[arg-type]
    writer.flush()
    assert writer.failure is not None and "AttributeError" in writer.failure
    writer.close()


def test_what_another_writer_removed_counts_no_more(tmp_path: Path) -> None:
    size = len(encode_header(KEY)) + len(encode(ANSWERS[0], 0))
    writer = RolloutCacheWriter(1.0, size + 8)
    for step in range(5):
        path = tmp_path / f"{step}/a"
        writer.begin(path, KEY)
        writer.add(ANSWERS[0], 0)
        writer.end()
        writer.flush()
        assert path.stat().st_size == size
        shutil.rmtree(path.parent)  # as rank 0 does for all
    writer.close()


def test_a_disk_error_ends_banking_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = RolloutCacheWriter(1.0, 1 << 20)
    writer.begin(tmp_path / "file/step/replica.bank", KEY)  # its directory is a file
    with caplog.at_level("WARNING"):
        for sample in ANSWERS:
            writer.add(sample, 0)
        writer.flush()
    assert len(caplog.records) == 1 and "rollout bank is off" in caplog.text
    assert writer.failure is not None
    writer.close()

"""Finished answers as records of an append-only file. Torch-free, no pickle.

    file     MAGIC, header (JSON: what the answers depend on), record, record, ...
    header   u32 length, u32 CRC-32, bytes
    record   fixed part with its own CRC-32 | answer: tokens int32, log-probs float32, text UTF-8, with its CRC-32

A file is written by one process in whole records, so a crash tears at most the last one: reading stops at the first
byte that does not add up, and what stands before it counts. Little-endian throughout.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_tlt.types import FinishReason, Prompt, Sample

MAGIC = b"TLTBANK1"
_HEADER = struct.Struct("<II")
# prompt id, sample index, CRC-32 of the prompt's tokens, finish reason, tokens, log-probs, bytes of text, CRC-32 of the
# answer; then the CRC-32 of all that.
_FIXED = struct.Struct("<qqIIIIII")
_SUM = struct.Struct("<I")
_REASONS: tuple[FinishReason, ...] = ("stop", "length")
_LONGEST_HEADER = 1 << 20


def encode_header(key: Mapping[str, Any]) -> bytes:
    """The beginning of a file whose answers depend on `key` (JSON-able)."""
    text = json.dumps(key, sort_keys=True).encode()
    return MAGIC + _HEADER.pack(len(text), zlib.crc32(text)) + text


def prompt_sum(prompt: Prompt) -> int:
    """CRC-32 of a prompt's tokens: an id alone means another question in other data."""
    return zlib.crc32(np.asarray(prompt.token_ids, "<i4").tobytes())


def encode(sample: Sample, prompt_crc: int) -> bytes:
    """One record. `sample` is finished, its log-probs float32 numbers."""
    text = sample.text.encode("utf-8", "surrogatepass")
    tokens, logprobs = np.asarray(sample.token_ids, "<i4"), np.asarray(sample.logprobs, "<f4")
    answer = b"".join((tokens.tobytes(), logprobs.tobytes(), text))
    fixed = _FIXED.pack(
        sample.prompt_id,
        sample.sample_index,
        prompt_crc,
        _REASONS.index(sample.finish_reason),
        len(tokens),
        len(logprobs),
        len(text),
        zlib.crc32(answer),
    )
    return b"".join((fixed, _SUM.pack(zlib.crc32(fixed)), answer))


def read_key(file: BinaryIO) -> dict[str, Any] | None:
    """What the answers of an open file depend on; None if its beginning is torn or it is no such file."""
    if file.read(len(MAGIC)) != MAGIC:
        return None
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(head)
    text = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(text) != length or zlib.crc32(text) != crc:
        return None
    key: dict[str, Any] = json.loads(text)
    return key


def read_samples(
    file: BinaryIO, wanted: Collection[int], policy_version: int
) -> Iterator[tuple[Sample, int]]:
    """The whole records of the prompts `wanted` behind the header, with the CRC-32 of their prompts' tokens."""
    size = os.fstat(file.fileno()).st_size
    while True:
        fixed, check = file.read(_FIXED.size), file.read(_SUM.size)
        if len(check) < _SUM.size or _SUM.unpack(check)[0] != zlib.crc32(fixed):
            return
        prompt_id, index, prompt_crc, reason, tokens, logprobs, text, crc = _FIXED.unpack(fixed)
        length = 4 * tokens + 4 * logprobs + text
        if file.tell() + length > size:
            return
        if prompt_id not in wanted:
            file.seek(length, os.SEEK_CUR)
            continue
        answer = file.read(length)
        if zlib.crc32(answer) != crc:
            return
        sample = Sample(
            prompt_id=prompt_id,
            sample_index=index,
            token_ids=np.frombuffer(answer, "<i4", tokens).tolist(),
            logprobs=np.frombuffer(answer, "<f4", logprobs, 4 * tokens).tolist(),
            text=answer[4 * (tokens + logprobs) :].decode("utf-8", "surrogatepass"),
            finish_reason=_REASONS[reason],
            policy_version=policy_version,
        )
        yield sample, prompt_crc


def read_file(
    path: Path, key: Mapping[str, Any], prompts: Mapping[int, int], policy_version: int
) -> dict[tuple[int, int], Sample] | None:
    """Answers to `prompts` (id: CRC-32 of its tokens) by (prompt id, sample index); None for a file of another key.

    Raises OSError.
    """
    with path.open("rb") as file:
        if read_key(file) != json.loads(json.dumps(key)):
            return None
        found = read_samples(file, prompts, policy_version)
        return {(s.prompt_id, s.sample_index): s for s, crc in found if prompts[s.prompt_id] == crc}

"""Responses as lines of a file, for rollout cache and checkpoints: the CRC-32 of a JSON object, then the object."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, BinaryIO

import numpy as np

from megatron_tlt.types import Prompt, Sample


def encode_line(value: Mapping[str, Any]) -> bytes:
    """One line of a cache file: CRC-32 of the JSON, the JSON."""
    body = json.dumps(value, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def encode_response(sample: Sample, prompt_crc: int) -> bytes:
    """A finished response as a line."""
    values = {f.name: getattr(sample, f.name) for f in fields(sample)}  # asdict copies each token, in the decoding loop
    if (routed_experts := values.pop("routed_experts")) is not None:
        encoded = base64.b64encode(routed_experts.tobytes()).decode()
        values["routed_experts"] = [routed_experts.dtype.name, routed_experts.shape, encoded]
    return encode_line({"prompt_crc": prompt_crc, "sample": values})


def decode_sample(fields: dict[str, Any]) -> Sample:
    """The sample of a line that `encode_response` wrote."""
    if (stored := fields.pop("routed_experts", None)) is not None:
        kind, shape, data = stored
        fields["routed_experts"] = np.frombuffer(base64.b64decode(data), kind).reshape(shape)
    for name in ("given", "earlier"):  # tuples, which JSON does not have
        fields[name] = tuple((first, second) for first, second in fields.get(name, ()))
    return Sample(**fields)


def whole_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The values of the lines up to the first one whose checksum is wrong."""
    return (json.loads(body) for _, body in whole_bodies(file))


def whole_bodies(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """As `whole_lines`, the JSON of each line behind the line's offset from the present place, in bytes."""
    offset = 0
    for line in file:
        body = line[9:-1]
        if line != b"%08x %s\n" % (zlib.crc32(body), body):
            return
        yield offset, body
        offset += len(line)


def prompt_crc(prompt: Prompt, has_env: bool = False) -> int:
    """CRC-32 of a prompt's tokens, seed and answer; `has_env`: and of all else that its environment sees. The same id
    may be another prompt in other data.
    """
    tokens = zlib.crc32(np.asarray(prompt.token_ids, "<i4").tobytes())
    crc = zlib.crc32(f"{prompt.seed} {prompt.answer}".encode(errors="replace"), tokens)
    if not has_env:
        return crc
    row = json.dumps([prompt.text, prompt.task, prompt.metadata], sort_keys=True, default=str)
    return zlib.crc32(row.encode(), crc)

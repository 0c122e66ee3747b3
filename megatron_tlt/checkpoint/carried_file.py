"""The file of a checkpoint with the responses that the next step continues (`rollout.carry_over`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_tlt.errors import CheckpointError
from megatron_tlt.resilience.response_lines import decode_sample, encode_response, prompt_crc, whole_lines
from megatron_tlt.types import Sample, SampleGroup

CARRIED = "carried.jsonl"  # in a checkpoint's directory, where responses are carried over


def carried_writer(groups: Sequence[SampleGroup]) -> Callable[[Path], None]:
    """A function that writes the responses of `groups`, which must not change until then; it may raise OSError."""

    def write(file: Path) -> None:
        with file.open("wb") as stream:
            for group in groups:
                crc = prompt_crc(group.prompt)
                stream.writelines(encode_response(sample.unpacked(), crc) for sample in group.samples)

    return write


def read_carried(file: Path) -> list[tuple[Sample, int]]:
    """The responses, each with the checksum of its prompt. Raises CheckpointError."""
    try:
        with file.open("rb") as stream:
            return [(decode_sample(line["sample"]), line["prompt_crc"]) for line in whole_lines(stream)]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error

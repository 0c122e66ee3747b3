"""Reading the events of one rank."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.observe.events import events_path
from megatron_tlt.observe.jsonl import JsonRow, read_rows


def read_events(run_dir: str | Path, rank: int) -> list[JsonRow]:
    """All events of a rank, in the order they were written, without torn lines."""
    return list(read_rows(events_path(run_dir, rank)))

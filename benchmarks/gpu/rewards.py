"""The reward of runs on random weights. Imports nothing heavy: worker processes load it."""

from __future__ import annotations

import zlib
from typing import Any


def reward(prompt: str, answer: str | None, response: str, metadata: dict[str, Any]) -> float:
    """0 or 1 by the answer's text: most groups have both, so that updates have a gradient."""
    return float(zlib.crc32(response.encode()) & 1)

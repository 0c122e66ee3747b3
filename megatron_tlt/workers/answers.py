"""What rewards and environments share: the answer in a response's text, and a reward as a number."""

from __future__ import annotations

import math
import re


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, stripped: of several answers the last one counts. None without a match or group."""
    found: str | None = None
    for match in pattern.finditer(text):
        found = match[1]
    return None if found is None else found.strip()


def as_number(value: object, where: str) -> float:
    """A reward as a finite float; numbers, booleans and 0-d arrays pass. Raises ValueError that begins with `where`."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{where} {value!r:.80} ({type(value).__name__}): must be a number or a boolean")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{where} {number}: must be finite")
    return number

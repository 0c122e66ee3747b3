"""What rewards and environments share: the answer in a response's text, and a reward as a number."""

from __future__ import annotations

import math
import re

_OPENING = re.compile(r"<([^<>/\s]+)>\s*$")


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, stripped: of several answers the last one counts. None without a match or group.

    A group between `<name>` and `</name>` begins behind the last `<name>`: a match of `<answer>(.*?)</answer>` begins
    with the first one, which a response may only mention.
    """
    last: re.Match[str] | None = None
    for match in pattern.finditer(text):
        last = match
    if last is None or last[1] is None:
        return None
    found = last[1]
    if opening := _OPENING.search(text, 0, last.start(1)):
        closing = f"</{opening[1]}>"
        if text[last.end(1) :].lstrip().startswith(closing) and closing not in found:
            found = found.rpartition(f"<{opening[1]}>")[2]
    return found.strip()


def as_number(value: object, where: str) -> float:
    """A reward as a finite float; numbers, booleans and 0-d arrays pass. Raises ValueError that begins with `where`."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{where} {value!r:.80} ({type(value).__name__}): must be a number or a boolean")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{where} {number}: must be finite")
    return number

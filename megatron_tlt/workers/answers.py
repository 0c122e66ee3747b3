"""The answer in a response's text, for rewards and environments."""

from __future__ import annotations

import re


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, stripped: of several answers the last one counts. None without a match or group."""
    found: str | None = None
    for match in pattern.finditer(text):
        found = match[1]
    return None if found is None else found.strip()

"""Failures of a user's code end with the place that they came from."""

from __future__ import annotations

import re


def without_place(failure: str | None, file: str = r"\S+") -> str:
    """A failure without its place. Fails where it has none, or one in another `file` (a regular expression)."""
    assert failure is not None
    text, count = re.subn(rf" \({file}\.py:\d+\)$", "", failure)
    assert count == 1, failure
    return text

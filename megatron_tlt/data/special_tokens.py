"""Special tokens in texts that never contain them: responses are decoded without special tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron_tlt.errors import ConfigProblem


def stop_problems(field: str, stops: Sequence[str], special: Collection[str]) -> Iterator[ConfigProblem]:
    """Stop strings that no response contains: those with a special token and other text."""
    for stop in stops:
        token = max((token for token in special if token in stop), key=len, default=None)
        if token is not None and stop != token:
            allowed = f"has the special token {token!r}, which texts of responses lack: use {token!r} alone, or none"
            yield ConfigProblem(field, stop, allowed)

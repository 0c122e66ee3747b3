"""Hashes that are the same on every machine and in every run (Python's own are not)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def digest(*parts: object) -> str:
    """Short hexadecimal fingerprint of the parts."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def stamp(paths: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of those that are there: another one once any of them is written."""
    there = ((path, path.stat()) for path in sorted(paths) if path.exists())
    return tuple((str(path), about.st_mtime_ns, about.st_size) for path, about in there)


def hashed(*parts: object) -> int:
    """64 uniform bits that depend on all parts; the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

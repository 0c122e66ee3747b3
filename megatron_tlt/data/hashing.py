"""Hashes that are the same on every machine and in every run (Python's own are not)."""

from __future__ import annotations

import hashlib


def digest(*parts: object) -> str:
    """Short hexadecimal fingerprint of the parts."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def hashed(*parts: object) -> int:
    """64 uniform bits that depend on all parts; the same on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

"""Whether a directory has a tokenizer. No `transformers` here: `megatron-tlt check` looks for one without it."""

from __future__ import annotations

from pathlib import Path

_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")  # of any age


def has_tokenizer(directory: Path) -> bool:
    """Whether a file is there that is called as those of a Hugging Face tokenizer are."""
    return any(any(directory.glob(name)) for name in _FILES)

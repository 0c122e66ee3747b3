"""The configuration arguments that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.errors import printable

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.base import Section

    RootT = TypeVar("RootT", bound=Section)

_MANY_CUT = 0.05  # share of responses, and the most that an accuracy could gain without the limit


def add_config(parser: argparse.ArgumentParser, about: str = "YAML file") -> None:
    """Adds `config` and `overrides` to a command."""
    parser.add_argument("config", type=Path, help=about)
    text = "values, or YAML files with values, that replace the file's"
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=v", help=text)


def read_config(args: argparse.Namespace, root: type[RootT]) -> RootT:
    """The configuration named by the arguments of `add_config`. Raises ConfigError with all problems."""
    return load_config(args.config, args.overrides, root)


def load_config(path: Path, overrides: Sequence[str], root: type[RootT]) -> RootT:
    """As `config.load.load_config`; rank 0 prints its notes."""
    from megatron_tlt.config import load

    notes: list[str] = []
    config = load.load_config(path, overrides, root, notes)
    if detect_launch().rank in (0, None):
        print("".join(f"megatron-tlt: warning: {printable(note)}\n" for note in notes), end="", file=sys.stderr)
    return config


def cut_warning(truncated: float, limit: str, has_env: bool, remedy: str) -> str | None:
    """A warning where the limit of length may have decided many responses; `truncated`: share of the responses."""
    if truncated < _MANY_CUT:
        return None
    turns = ", or a limit of the environment," if has_env else ""
    return f"{truncated:.1%} of the responses reached {limit}{turns} and have most likely no answer: {remedy}"

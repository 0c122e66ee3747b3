"""The configuration arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.base import Section

    RootT = TypeVar("RootT", bound=Section)


def add_config(parser: argparse.ArgumentParser, about: str = "YAML file") -> None:
    """Adds `config` and `overrides` to a command."""
    parser.add_argument("config", type=Path, help=about)
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")


def read_config(args: argparse.Namespace, root: type[RootT]) -> RootT:
    """The configuration named by the arguments of `add_config`. Raises ConfigError with all problems."""
    from megatron_tlt.config.load import load_config

    return load_config(args.config, args.overrides, root)

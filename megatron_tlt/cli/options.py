"""What several commands share: the configuration arguments, and checks of the files that a command will write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_tlt.errors import ConfigProblem

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config, SftConfig
    from megatron_tlt.config.sim import SimConfig

    RootT = TypeVar("RootT", Config, SftConfig, SimConfig)


def add_config(parser: argparse.ArgumentParser, about: str = "YAML file") -> None:
    """Adds `config` and `overrides` to a command."""
    parser.add_argument("config", type=Path, help=about)
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")


def read_config(args: argparse.Namespace, root: type[RootT]) -> RootT:
    """The configuration that `add_config` took. Raises ConfigError with all problems."""
    from megatron_tlt.config.load import load_config

    return load_config(args.config, args.overrides, root)


def output_file_problems(option: str, path: Path | None) -> list[ConfigProblem]:
    """What keeps a file from being written at `path` (None: nothing is to be written). Creates nothing.

    Missing parent directories are no problem: the commands make them.
    """
    if path is None:
        return []
    if path.is_dir():
        return [ConfigProblem(option, str(path), "is a directory: name a file")]
    if path.exists():
        return [] if os.access(path, os.W_OK) else [ConfigProblem(option, str(path), "is not writable")]
    return _parent_problems(option, path)


def _parent_problems(option: str, path: Path) -> list[ConfigProblem]:
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir():
        return [ConfigProblem(option, str(path), f"lies below {parent}, which is not a directory")]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [ConfigProblem(option, str(path), f"{parent} is not writable")]
    return []

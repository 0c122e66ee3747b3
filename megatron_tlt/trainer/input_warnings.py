"""Everything about a run's configuration and files that it can run with, but that its user should read first.

`check` prints these warnings and rank 0 logs them at the start. What cannot run is a problem (`preflight`).
"""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.prompts import open_source
from megatron_tlt.data.sources import FileSource
from megatron_tlt.envs.build import environment_warning
from megatron_tlt.rewards.build import answer_warning


def input_warnings(config: Config | SftConfig) -> list[str]:
    """Every warning, one line each, of a configuration without problems. Reads files on this machine, no tensor."""
    found: list[str] = []
    if isinstance(config, Config) and config.env is not None and (text := environment_warning(config.env)) is not None:
        found.append(text)
    if isinstance(config, Config):
        found += _answer_warnings(config)
    return found


def _answer_warnings(config: Config) -> list[str]:
    """Rows of prompt files whose answers a reward function cannot use."""
    found = []
    for field, section in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if section is not None and section.path is not None and Path(section.path).exists():
            source = open_source(section, field, seed=0)
            text = answer_warning(config.rewards, source.answers()) if isinstance(source, FileSource) else None
            found += [] if text is None else [text]
    return found

"""Everything about a run's configuration and files that it can run with, but that its user should read first.

`check` prints these warnings and rank 0 logs them at the start. What cannot run is a problem (`preflight`).
"""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.long_prompts import long_prompt_warnings
from megatron_tlt.data.sources import unread_warning
from megatron_tlt.envs.build import environment_warning


def input_warnings(config: Config | SftConfig) -> list[str]:
    """Every warning, one line each, of a configuration without problems. Reads files on this machine, no tensor."""
    found: list[str] = []
    if isinstance(config, Config) and config.env is not None and (text := environment_warning(config.env)) is not None:
        found.append(text)
    if isinstance(config, Config):
        sources = (("data.train", config.data.train), ("data.eval", config.data.eval))
        unread = [unread_warning(source, field) for field, source in sources if source is not None]
        found += [text for text in unread if text is not None]
        found += long_prompt_warnings(config.data, Path(config.model.tokenizer or config.model.path))
    return found

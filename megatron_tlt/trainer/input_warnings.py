"""Everything about a run's configuration and files that it can run with, but that its user should read first.

`check` prints these warnings and rank 0 logs them at the start. What cannot run is a problem (`preflight`).
"""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.envs.build import environment_warning
from megatron_tlt.models.config import ModelConfig


def input_warnings(config: Config | SftConfig) -> list[str]:
    """Every warning, one line each, of a configuration without problems. Reads files on this machine, no tensor."""
    found: list[str] = []
    if isinstance(config, Config) and config.env is not None and (text := environment_warning(config.env)) is not None:
        found.append(text)
    return [*found, *_of_drafter(config)]


def _of_drafter(config: Config | SftConfig) -> list[str]:
    """Of a drafter that is on this machine, beside the model."""
    path = config.rollout.speculation.drafter_path if isinstance(config, Config) else None
    if path is None or not (Path(path).exists() and (Path(config.model.path) / "config.json").is_file()):
        return []
    from megatron_tlt.drafter.checkpoint import drafter_warnings  # here, for it needs torch

    assert isinstance(config, Config)
    return drafter_warnings(config.rollout.speculation, ModelConfig.from_hf(config.model.path))

"""Everything about a run's configuration and files that it can run with, but that its user should read first.

`check` prints these warnings and rank 0 logs them at the start. What cannot run is a problem (`preflight`).
"""

from __future__ import annotations

from megatron_tlt.config.checks.learning import kl_estimator_warning
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.envs.build import environment_warning


def input_warnings(config: Config | SftConfig) -> list[str]:
    """Every warning, one line each, of a configuration without problems. Reads files on this machine, no tensor."""
    found: list[str] = []
    if isinstance(config, Config) and config.env is not None and (text := environment_warning(config.env)) is not None:
        found.append(text)
    if isinstance(config, Config) and (text := kl_estimator_warning(config.algorithm)) is not None:
        found.append(text)
    return found

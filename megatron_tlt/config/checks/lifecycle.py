"""Cross-checks of graceful shutdown and the watchdog."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem

Problems = Iterator[ConfigProblem]


def check_stop(config: Config) -> Problems:
    """A signal must leave time for a checkpoint."""
    stop = config.stop
    for name, grace in (("stop.warning_s", stop.warning_s), ("stop.term_s", stop.term_s)):
        if grace <= stop.save_s:
            yield ConfigProblem(name, grace, f"must be above stop.save_s ({stop.save_s:g})")


def check_watchdog(config: Config) -> Problems:
    """A rank must be able to show life several times before its silence counts."""
    hang, beat = config.watchdog.hang_s, config.watchdog.heartbeat_s
    if hang and hang < 3 * beat:
        yield ConfigProblem(
            "watchdog.hang_s", hang, f"must be 0 or >= 3 * watchdog.heartbeat_s ({3 * beat:g})"
        )

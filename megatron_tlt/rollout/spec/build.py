"""Putting the speculator together from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.scheduler import Scheduler
from megatron_tlt.rollout.spec.base import Drafter
from megatron_tlt.rollout.spec.eagle import EagleDrafter
from megatron_tlt.rollout.spec.speculator import Speculator
from megatron_tlt.rollout.spec.strategy import build_selector

if TYPE_CHECKING:
    from megatron_tlt.models.eagle.base import EagleDecoder
    from megatron_tlt.rollout.model_runner import ModelRunner
    from megatron_tlt.rollout.spec.history import AnswerHistory


@dataclass(frozen=True)
class Drafting:
    """What an engine needs to speculate: the configuration, and the parts made outside of it."""

    section: SpeculationSection
    eagle: EagleDecoder | None = None  # the trained drafter, where the configuration names one
    history: AnswerHistory | None = None  # earlier answers, for the suffix drafter


def build_speculator(drafting: Drafting, scheduler: Scheduler, runner: ModelRunner) -> Speculator:
    """The speculator of an engine, hooked into its scheduler and runner.

    Raises ConfigError where the drafter needs what is not there.
    """
    section = drafting.section
    trained = _eagle(drafting, scheduler, runner)
    drafter = _drafter(drafting, scheduler, trained)
    speculator = Speculator(
        drafter,
        build_selector(section, drafter.kind),
        scheduler.rows,
        scheduler.reserve,
        runner.tp,
        trained,
        clock=_clock(runner),
    )
    scheduler.on_start, scheduler.on_stop = speculator.start, speculator.stop
    if trained is not None:
        runner.on_chunks, runner.on_copies = trained.feed_chunks, trained.copy_blocks
    return speculator


def _eagle(drafting: Drafting, scheduler: Scheduler, runner: ModelRunner) -> EagleDrafter | None:
    section, eagle = drafting.section, drafting.eagle
    if not section.uses_eagle:
        return None
    if eagle is None:
        raise ConfigError.of(
            "rollout.speculation.drafter", section.drafter, "the engine got no eagle decoder"
        )
    pages = runner.keep_pages()
    return EagleDrafter(eagle, scheduler.rows, pages, section.window)


def _clock(runner: ModelRunner) -> Callable[[], float]:
    """What strategies are compared by: on CPU this thread's own time, whatever else the machine is busy with."""
    return time.thread_time if runner.device.type == "cpu" else time.perf_counter


def _drafter(drafting: Drafting, scheduler: Scheduler, trained: EagleDrafter | None) -> Drafter:
    section = drafting.section
    if section.drafter == "eagle":
        assert trained is not None
        return trained
    from megatron_tlt.rollout.spec.suffix import SuffixDrafter  # needs the C library

    suffix = SuffixDrafter(section.suffix, scheduler.rows, drafting.history)
    if trained is None:
        return suffix
    from megatron_tlt.rollout.spec.hybrid import HybridDrafter

    return HybridDrafter(suffix, trained, len(scheduler.rows.limit))

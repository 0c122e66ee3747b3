"""Builds an engine's speculator from its configuration."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.scheduler import Scheduler
from megatron_tlt.rollout.speculation.base import Drafter, NoDrafter
from megatron_tlt.rollout.speculation.pre_rollouts import PreRolledDrafter
from megatron_tlt.rollout.speculation.selector import build_selector
from megatron_tlt.rollout.speculation.speculator import Speculator
from megatron_tlt.rollout.speculation.suffix import SuffixDrafter
from megatron_tlt.rollout.speculation.trained import TrainedDrafter

if TYPE_CHECKING:
    from megatron_tlt.drafters.decoder import DrafterDecoder
    from megatron_tlt.rollout.model_runner import ModelRunner
    from megatron_tlt.rollout.speculation.history import ResponseHistory


@dataclass(frozen=True)
class Drafting:
    """Configuration and parts of an engine that speculates."""

    section: SpeculationSection
    verify_rows: int  # most rows of a step that verifies pre-rollouts, if the drafter's have no more
    decoder: DrafterDecoder | None = None  # the trained drafter, where the configuration names one
    history: ResponseHistory | None = None  # earlier responses, for the suffix drafter


def build_speculator(drafting: Drafting, scheduler: Scheduler, runner: ModelRunner) -> Speculator:
    """The speculator of an engine. The runner keeps hidden states if the drafter reads them.

    Raises ConfigError if the drafter needs a part that is missing.
    """
    section, rows = drafting.section, scheduler.rows
    trained = _trained(drafting, scheduler, runner) if section.trained else None
    drafter: Drafter = trained or NoDrafter()
    if section.drafter == "suffix":
        drafter = SuffixDrafter(section.suffix, rows, drafting.history)
    limits = scheduler.limits
    pre_rollouts = PreRolledDrafter.of(section, rows, len(rows.token_ids), drafting.verify_rows, limits.max_running)
    # On CPU strategies are compared by this thread's own time, however busy the machine is.
    clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
    selector = build_selector(section)
    return Speculator(drafter, selector, rows, scheduler.reserve, runner.tp, pre_rollouts, trained, clock)


def _trained(drafting: Drafting, scheduler: Scheduler, runner: ModelRunner) -> TrainedDrafter:
    """The trained drafter; its steps run by the policy's pool where there is one."""
    section, decoder = drafting.section, drafting.decoder
    if decoder is None:
        raise ConfigError.of("rollout.speculation.drafter", section.drafter, "the engine got no drafter")
    trained = TrainedDrafter(decoder, scheduler.rows, runner.keep_pages())
    if runner.pool is not None:
        decoder.use_graphs(runner.pool.graphs.run)
    return trained

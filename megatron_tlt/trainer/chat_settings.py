"""What a run gives to its chat template: variables, and one date from its first start on."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.chat_template import TemplateSettings
from megatron_tlt.data.hub import RootT
from megatron_tlt.observe.runfiles import CONFIG_FILE

if TYPE_CHECKING:
    from megatron_tlt.distributed.together import Ranks


def template_settings(config: TrainingConfig) -> TemplateSettings:
    """For the tokenizer of a run."""
    section = config.chat
    return TemplateSettings(section.model_dump(mode="json")["chat_template_kwargs"], section.chat_template_date)


def with_date(config: RootT, ranks: Ranks, unfinished: Path | None = None) -> RootT:
    """The configuration with a date for templates that show today's, the same on every rank. Collective.

    A run that goes on or is evaluated keeps the date of its first start: else its prompts would change overnight.
    `unfinished`: a directory that `run_record.write_config` has written to, which comes before the run's.
    """
    name, section = config.chat_name, config.chat
    if section.chat_template_date is not None:
        return config
    found = (_recorded(config, name, unfinished) or date.today()) if ranks.is_main else None
    dated = section.model_copy(update={"chat_template_date": ranks.broadcast_object(found)})
    return config.model_copy(update={name: dated})


def _recorded(config: TrainingConfig, section: str, unfinished: Path | None) -> date | None:
    """The date in config.json of the run that goes on; None where none does."""
    recorded_in = config.recorded_in
    for directory in filter(None, (unfinished if recorded_in else None, *recorded_in)):
        try:
            about: Any = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            return date.fromisoformat(about[section]["chat_template_date"])
        except (OSError, ValueError, LookupError, TypeError):  # no run yet, or one of an older version
            continue
    return None

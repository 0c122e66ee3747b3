"""What a run gives to its chat template: variables, and one date from its first start on."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.chat_template import TemplateSettings
from megatron_tlt.data.hub import RootT, with_names
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.runfiles import CONFIG_FILE

if TYPE_CHECKING:
    from megatron_tlt.distributed.together import Ranks


def template_settings(config: TrainingConfig) -> TemplateSettings:
    """For the tokenizer of a run."""
    section = config.chat
    return TemplateSettings(section.model_dump(mode="json")["chat_template_kwargs"], section.chat_template_date)

_LEARNS_FROM = ("model", "data", "env", "rewards", "algorithm", "optimizer")  # sections


def with_date(config: RootT, ranks: Ranks, unfinished: Path | None = None) -> RootT:
    """The configuration with a date for templates that show today's, the same on every rank. Collective.

    A run that goes on or is evaluated keeps the date of its first start: else its prompts would change overnight.
    `unfinished`: a directory that `write_config` has written to, which comes before the run's.
    """
    name, section = config.chat_name, config.chat
    if section.chat_template_date is not None:
        return config
    found = (_recorded(config, name, unfinished) or date.today()) if ranks.is_main else None
    dated = section.model_copy(update={"chat_template_date": ranks.broadcast_object(found)})
    return config.model_copy(update={name: dated})


def write_config(config: TrainingConfig, directory: Path) -> list[str]:
    """Records a training's configuration in the directory from which it goes on, which is made where it is missing.

    Returns the fields of `_LEARNS_FROM` that the record of its last start has otherwise.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    named = with_names(config).model_dump(mode="json")  # a start on other nodes finds the same files
    try:
        before: Any = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        changed = [f for s in _LEARNS_FROM if s in named and s in before for f in _changed(before[s], named[s], s)]
    except (OSError, ValueError, TypeError):  # the first start, or no record of this program
        changed = []
    write_atomically(directory / CONFIG_FILE, [json.dumps(named, indent=2)])
    return changed


def _changed(before: Any, now: Any, field: str) -> list[str]:
    """Fields of two JSON trees whose values differ; one that only one of them has is of another version."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [f for key in before.keys() & now.keys() for f in _changed(before[key], now[key], f"{field}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [f for i, pair in enumerate(zip(before, now)) for f in _changed(*pair, f"{field}.{i}")]
    return [] if before == now else [field]


def _recorded(config: TrainingConfig, section: str, unfinished: Path | None) -> date | None:
    """The date in config.json of the run that goes on; None where none does."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    named = None if resume == "auto" else Path(resume).absolute().parent.parent  # RUN/checkpoints/STEP
    for directory in filter(None, (unfinished, config.state_dir, named)):
        try:
            about: Any = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            return date.fromisoformat(about[section]["chat_template_date"])
        except (OSError, ValueError, LookupError, TypeError):  # no run yet, or one of an older version
            continue
    return None

"""The record of a training's configuration, and what differs from that of its last start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tlt.actor.base_fingerprint import reference_fingerprint
from megatron_tlt.actor.checkpoint_files import record_of
from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.hashing import digest
from megatron_tlt.data.hub import with_names
from megatron_tlt.data.tokenizer import TOKENIZER_FILES
from megatron_tlt.models.hf.peft import is_same_model
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.jsonl import StepFile, read_rows
from megatron_tlt.observe.runfiles import CHANGES_FILE, CONFIG_FILE
from megatron_tlt.workers.user_code import code_digest, source_of

# Sections, and fields of others, that decide what a run learns and how it is measured.
_LEARNS_FROM = (
    *("model", "data", "env", "rewards", "algorithm", "optimizer", "code", "processor", "reference", "held_out"),
    *("tokenizer", "train.prompts_per_step", "train.seed"),
    *("rollout.samples_per_prompt", "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"),
    *("rollout.max_tokens", "rollout.carry_over", "rollout.stop", "actor.load_balancing_loss", "actor.router_z_loss"),
    *("actor.router_replay", "actor.lora", "rollout.backend", "rollout.dtype", "eval"),
)
_ADAPTER, _DRAFTER = "actor.lora.adapter_path", "rollout.speculation.drafter_path"
_FREE = (".params", ".chat_template_kwargs")  # mappings whose keys are the user's


def write_config(
    config: TrainingConfig,
    directory: Path,
    step: int | None,
    processor: str,
    has_drafter: bool = False,
    held_out: Mapping[str, str] | None = None,
) -> list[str]:
    """Records a training's configuration in the directory from which it goes on, which is made where it is missing.

    The record has five fields more: the kind of `processor`, and fingerprints, by field: `code`, of the user's rewards
    and environment, `reference`, of the weights that the policy is compared with, which no checkpoint holds,
    `tokenizer`, of its files, and `held_out`, of rows. `step`: of the checkpoint that it goes on from, in which there
    may be a drafter; None: it begins.

    Returns the fields of `_LEARNS_FROM` that the record of its last start has otherwise, of one that goes on, and
    the drafter's where the checkpoint has one; a line of `CHANGES_FILE` has their former and new values. The first
    start of a run that branches off another one has that one's record, a rollback the values that its step had.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    named = with_names(config).model_dump(mode="json")  # a start on other nodes finds the same files
    named |= {"code": _code(named), "reference": reference_fingerprint(config), "processor": processor}
    named |= {"tokenizer": _tokenizer(config), "held_out": dict(held_out or {})}
    before = _last_record([directory, *config.recorded_in])
    found = {f: pair for s in named if s in before for f, pair in _changed(before[s], named[s], s)}
    later = [row for row in read_rows(directory / CHANGES_FILE) if row["step"] > (step or 0)]
    for field, (former, new) in (item for row in reversed(later) for item in row["changed"].items()):
        found[field] = former, found.get(field, (former, new))[1]
    found = {field: pair for field, pair in found.items() if pair[0] != pair[1]}
    named_too = {_DRAFTER} if has_drafter else set()
    changed = {f: pair for f, pair in found.items() if step is not None and (_is_learned_from(f) or f in named_too)}
    if changed or (directory / CHANGES_FILE).exists():
        with StepFile(directory / CHANGES_FILE, step or 0) as file:  # without lines of later steps
            file.write_rows(step or 0, *([{"changed": changed}] if changed else []))
    write_atomically(directory / CONFIG_FILE, [json.dumps(named, indent=2)])
    return [f"{field}{_remark(field, pair)}" for field, pair in changed.items()]


def _last_record(places: Sequence[Path]) -> dict[str, Any]:
    """The record in the first of some directories that has one; empty where none has one of this program."""
    for place in places:
        with suppress(OSError, ValueError):
            if isinstance(record := json.loads((place / CONFIG_FILE).read_text(encoding="utf-8")), dict):
                return record
    return {}


def other_model(config: TrainingConfig, run_dir: Path) -> list[str]:
    """Warnings of a model and a tokenizer that are not those of the run whose record is in `run_dir`.

    Their last words are compared: a directory may have moved since, which is why none is refused.
    """
    try:
        record = json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["model"]
        path, tokenizer = str(record["path"]), str(record.get("tokenizer") or record["path"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or of another program
        return []
    own = with_names(config).model
    pairs = {(path, own.path): "model.path"}
    pairs.setdefault((tokenizer, own.tokenizer_path), "model.tokenizer")
    return [
        f"{field} = {mine}: config.json of the run has {its}; the files of the former go along with the weights"
        for (its, mine), field in pairs.items()
        if not is_same_model(its, mine)
    ]


def _remark(field: str, values: tuple[Any, Any]) -> str:
    """What a warning says behind a changed field. With a drafter's directory or without has an effect: the learning
    rate is that of a trained one or of a new one.
    """
    if field == _ADAPTER or (field == _DRAFTER and None not in values):
        return " (without effect: the weights are the checkpoint's)"
    remarks = {
        "reference": "other weights",
        "tokenizer": "other files",
        "held_out": "other rows",
        "code": "or a .py file beside it",
    }
    remark = remarks.get(field.partition(".")[0])
    return f" ({remark})" if remark else ""


def _is_learned_from(field: str) -> bool:
    """Whether a field, or one that it is in, is of `_LEARNS_FROM`."""
    return any(f"{field}.".startswith(f"{name}.") for name in _LEARNS_FROM)


def _changed(before: Any, now: Any, field: str) -> list[tuple[str, tuple[Any, Any]]]:
    """Fields of two JSON trees whose values differ, with both values; one that only one of them has is of another
    version, but for those of a user's own mapping, which is compared whole.
    """
    if isinstance(before, dict) and isinstance(now, dict) and not field.endswith(_FREE):
        return [f for key in before.keys() & now.keys() for f in _changed(before[key], now[key], f"{field}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [f for i, pair in enumerate(zip(before, now)) for f in _changed(*pair, f"{field}.{i}")]
    return [] if before == now else [(field, (before, now))]


def _tokenizer(config: TrainingConfig) -> dict[str, str]:
    """Fingerprint of the tokenizer's files, its chat templates among them, by the field that names them."""
    field, directory = "model.tokenizer" if config.model.tokenizer else "model.path", Path(config.model.tokenizer_path)
    files = sorted(path for pattern in TOKENIZER_FILES for path in directory.glob(pattern))
    files += [path for folder in files if folder.is_dir() for path in sorted(folder.iterdir())]
    found = {path.relative_to(directory): record_of(path).sha256 for path in files if path.is_file()}
    return {field: digest(*found.items())} if found else {}


def _code(named: dict[str, Any]) -> dict[str, str]:
    """Fingerprints of the modules that a dumped configuration names, by their paths in it."""
    users = [*named.get("rewards", {}).get("functions", []), named.get("env") or {}]
    paths = [user["path"] for user in users if user.get("path") is not None]
    found = {}
    for path in paths:
        with suppress(OSError):  # another file beside it may be someone else's, or go at this moment
            if (source := source_of(path)) is not None:
                found[path] = code_digest(source)
    return found

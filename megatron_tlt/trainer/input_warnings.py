"""Everything about a run's configuration and files that it can run with, but that its user should read first.

`check` prints these warnings and rank 0 logs them at the start. What cannot run is a problem (`preflight`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_tlt.actor.checkpoint_files import complete_steps
from megatron_tlt.checkpoint.resume import removal_warning, schedule_warning
from megatron_tlt.config.actor import ActorSection
from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.checks.learning import algorithm_warnings, learning_rate_warning, warmup_warning
from megatron_tlt.config.checks.speculation import idle_warnings, unread_settings
from megatron_tlt.config.planning.disk import checkpoint_bytes, gb
from megatron_tlt.config.root import Config, SftSection, TrainingConfig
from megatron_tlt.data.chat import all_texts
from megatron_tlt.data.completions import Completion, read_completions
from megatron_tlt.data.long_prompts import long_prompt_warnings
from megatron_tlt.data.prompts import open_source
from megatron_tlt.data.sources import FileSource, unread_warning
from megatron_tlt.data.turn_form import read_turn_form
from megatron_tlt.distributed.processors import has_bf16_products
from megatron_tlt.envs.build import environment_warning
from megatron_tlt.models.hf.config import ModelConfig, shape_of
from megatron_tlt.models.hf.files import config_warnings, model_warnings
from megatron_tlt.models.hf.peft import adapter_warning
from megatron_tlt.rewards.build import answer_warning
from megatron_tlt.trainer.chat_checks import chat_warnings, row_warnings, unread_tools
from megatron_tlt.trainer.environments import prompt_tools, reward_warning
from megatron_tlt.trainer.token_checks import tokenizer_here, tokenizer_warnings


def input_warnings(config: TrainingConfig, device: Device | None, num_ranks: int | None = None) -> list[str]:
    """Every warning, one line each, of a configuration without problems. Reads files on this machine, no tensor.

    `device`: of this machine's ranks, `num_ranks`: of the run; None if that is not known.
    """
    found = _of_model(config)
    own = [adapter_warning(config.actor.lora, config.model.path), _slow_update(config.actor, device)]
    own += [
        _fp32_on_gpus(config, device),
        _unread_modules(config.actor),
        learning_rate_warning(config, shape_of(config.model)),
        warmup_warning(config),
        schedule_warning(config),
        removal_warning(config),
    ]
    found += [*filter(None, own), *chat_warnings(config), *tokenizer_warnings(config)]
    found += [] if config.records is None else _of_records(config, config.records)
    return [*found, *(() if config.rl is None else _of_rl(config.rl, device, num_ranks))]


def disk_warning(config: TrainingConfig) -> str | None:
    """Of a disk, as it is now, that has no room for the run's checkpoints beside those that are there; a quota is not
    seen. None where the model's shape is not known, too.
    """
    shape = shape_of(config.model)
    if shape is None or (config.rl is not None and not config.rl.trains):
        return None
    state = config.state_dir.absolute()
    free = shutil.disk_usage(next(folder for folder in (state, *state.parents) if folder.exists())).free
    size = checkpoint_bytes(config, shape)
    more = max(1, config.checkpoint.keep + 1 - len(complete_steps(state / "checkpoints")))
    if free >= more * size:
        return None
    return (
        f"{gb(free)} are free under {config.state_dir}, and checkpoints take {gb(more * size)} more ({gb(size)} each, "
        f"checkpoint.keep = {config.checkpoint.keep}, and the one that is being written)"
    )


def _of_model(config: TrainingConfig) -> list[str]:
    """What is left out, or cannot be compared, of the files that a run starts from."""
    path, start = config.model.path, config.model.megatron_path
    found = model_warnings(path) if config.reads_weights else config_warnings(Path(path) / "config.json")
    if start is None or not Path(start).exists():
        return found
    from megatron_tlt.actor.torch_dist_reader import TorchDistReader  # here, for it needs torch

    return found + TorchDistReader(start).warnings()


def _slow_update(actor: ActorSection, device: Device | None) -> str | None:
    """Of an update in bf16 by a processor that has no products of it: PyTorch converts each number."""
    if actor.dtype != "bf16" or device != "cpu" or has_bf16_products():
        return None
    return "actor.dtype = bf16: this processor has no products of bf16, its updates take some 5 times those of fp32"


def _fp32_on_gpus(config: TrainingConfig, device: Device | None) -> str | None:
    """Of the default type on GPUs, where it costs most of their speed."""
    rl = config.rl
    types: dict[str, str] = {}
    if rl is None or rl.trains:
        types["actor.dtype"] = config.actor.dtype
    if rl is not None:
        types["rollout.dtype"] = rl.rollout.dtype
    if device != "cuda" or "fp32" not in types.values():
        return None
    given = ", ".join(f"{name} = {dtype}" for name, dtype in types.items())
    return f"{given}: on GPUs fp32 takes twice the memory of bf16 and several times its time; set {' and '.join(types)}"


def _unread_modules(actor: ActorSection) -> str | None:
    """Of modules to compute again where nothing is. A recipe may set them, so this is no problem."""
    if actor.recompute != "none" or actor.recompute_modules == ActorSection().recompute_modules:
        return None
    listed = ", ".join(actor.recompute_modules)
    return f"actor.recompute_modules = [{listed}] has no effect with actor.recompute = none; selective reads it"


def _of_rl(config: Config, device: Device | None, num_ranks: int | None) -> list[str]:
    """Of what fine-tuning does not have."""
    own = [*algorithm_warnings(config.algorithm), *unread_settings(config.rollout.speculation)]
    own += idle_warnings(config, device, num_ranks)
    teacher = [] if config.algorithm.teacher is None else model_warnings(config.algorithm.teacher)
    tools = prompt_tools(config)
    others = reward_warning(config), unread_tools(config, tools)
    own += filter(None, [*others, None if config.env is None else environment_warning(config.env)])
    long = long_prompt_warnings(config.data, tokenizer_here(config), tools)
    return [*teacher, *own, *_of_rows(config), *long, *_of_drafter(config)]


def _of_rows(config: Config) -> list[str]:
    """Files of a data set that belong to no split, rows whose answers a reward function cannot use, tools of rows that
    no prompt shows, and rows that are rendered already.
    """
    found: list[str | None] = []
    tokenizer = tokenizer_here(config) if config.data.chat_template else None
    for field, section in config.data.sources:
        if not section.is_here and not (section.kind == "tasks" and config.rewards.needs_answers):
            continue
        found.append(unread_warning(section, field))
        source = open_source(section, field, 0, config.data.system_prompt)
        found.append(answer_warning(config.rewards, [*source.answers()]))
        if tokenizer is not None and isinstance(source, FileSource):
            rows = map(source.row, range(source.size))
            prompts = ((row.place, row.messages or row.prompt) for row in rows)
            has_tools = any(tools for *_, tools in source.examples)
            at = f"{field}.path = {section.path}"
            found += row_warnings(tokenizer, at, _remedy(config), prompts, has_tools)
    return [text for text in found if text is not None]


def _of_records(config: TrainingConfig, section: SftSection) -> list[str]:
    """Records that are left out because they have no text to learn, turns of the assistant that are context, and what
    `_of_rows` finds in prompts.
    """
    found = []
    tokenizer = tokenizer_here(config) if section.chat_template else None
    for field, path, split in section.files:
        if not Path(path).exists():
            continue
        rows, places = read_completions(section, Path(path), split)
        at = f"{field} = {path}"
        if blank := [place for place, row in zip(places, rows, strict=True) if row.is_blank]:
            why = f"have no text to learn and are left out (the first: {blank[0]})"
            found.append(f"{at}: {len(blank)} of {len(rows)} records {why}")
        if earlier := sum(row.earlier for row in rows):
            turns = earlier + sum(len(row.turns[::2]) for row in rows)
            why = "stand before the last message of the user: they are context and not learned"
            found.append(f"{at}: {earlier} of {turns} turns of the assistant {why}")
        if tokenizer is not None:
            end = tokenizer.token(read_turn_form(tokenizer).end[-1])
            texts = (_rendered_texts(row, end) for row in rows)
            has_tools = any(row.tools for row in rows)
            found += row_warnings(tokenizer, at, _remedy(config), zip(places, texts, strict=True), has_tools)
    return found


def _rendered_texts(row: Completion, end: str) -> str:
    """The texts of a record that may be rendered already: a text to learn only where `end`, the token that ends a turn,
    is within it; at its end it does no harm, and other special tokens are usual, as before a call of a tool.
    """
    turns = (text for text in row.turns[::2] if end in text.removesuffix(end))
    return "\n".join([all_texts(row.prompt), *turns])


def _remedy(config: TrainingConfig) -> str:
    """What takes rows that are rendered already."""
    return f"{config.chat_name}.chat_template: false takes texts as they stand"


def _of_drafter(config: Config) -> list[str]:
    """Of a drafter that is on this machine, beside the model."""
    path = config.rollout.speculation.drafter_path
    if path is None or not (Path(path).exists() and (Path(config.model.path) / "config.json").is_file()):
        return []
    from megatron_tlt.drafters.checkpoint import drafter_warnings  # here, for it needs torch

    policy, in_megatron = ModelConfig.from_hf(config.model.path), not config.reads_weights
    return drafter_warnings(config.rollout.speculation, policy, in_megatron=in_megatron)

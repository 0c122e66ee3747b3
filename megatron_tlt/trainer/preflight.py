"""Everything that can be wrong with a run, found at once and before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.backends.vllm.launch import python_problems
from megatron_tlt.checkpoint.resume import checkpoint_problems
from megatron_tlt.config.checks.files import output_directory_problems
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.planning.report import render_check
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.prompts import source_problems
from megatron_tlt.data.sources import read_completions
from megatron_tlt.data.tokenizer import has_tokenizer
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem, DataError, shortened
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_files import safetensors_problems
from megatron_tlt.rewards.build import function_problems

if TYPE_CHECKING:
    from megatron_tlt.config.checks.layout import Device
    from megatron_tlt.distributed.world import World

_DRAFTER_PATH = "rollout.speculation.drafter_path"


def check_report(config: Config | SftConfig, ranks: int | None) -> str:
    """`megatron-tlt check`: the report, or ConfigError with every problem.

    Model and prompt files may be on another machine (a login node has neither); where they are here they count. Where
    the model is not, `model.architecture` must say what is planned.
    """
    num_ranks = ranks if ranks is not None else config.cluster.num_ranks
    problems = _problems(config, num_ranks, None) + _problems_of_large_files(config)
    if config.model.architecture is None:
        problems += missing_model(config)
    field, path = ("train.run_dir", config.train.run_dir) if isinstance(config, Config) else ("sft.out", config.sft.out)
    problems += output_directory_problems(field, path, must_be_writable=False)
    if problems:
        raise ConfigError(problems)
    absent = [f"warning: not on this machine: {p.path} = {p.value}" for p in missing_files(config)]
    shape = None if (model := _model(config)) is None else model.architecture
    return "\n".join([render_check(config, shape, num_ranks), *absent])


def check_on(config: Config | SftConfig, world: World, found_before: Sequence[ConfigProblem] = ()) -> None:
    """The checks on the world there is, where every file must be. Raises ConfigError with every problem."""
    problems = [*found_before, *missing_files(config)]
    problems += _problems(config, world.size, "cuda" if world.device.type == "cuda" else "cpu")
    # One rank looks into many files, which a run that goes on may be removing.
    problems += world.broadcast_object(_problems_of_large_files(config) if world.is_main else [])
    if problems:
        raise ConfigError(problems)


def _problems(config: Config | SftConfig, num_ranks: int, device: Device | None) -> list[ConfigProblem]:
    model = _model(config)
    shape, positions = (None, None) if model is None else (model.architecture, model.max_position_embeddings)
    found = find_problems(config, shape, num_ranks, device, positions)
    return found + model_problems(config) + tokenizer_problems(config) + input_problems(config)


def _problems_of_large_files(config: Config | SftConfig) -> list[ConfigProblem]:
    """Of weights, the checkpoint to resume from and the drafter, where they are on this machine."""
    model = _model(config)
    found = weight_problems(config, model)
    if isinstance(config, Config):
        found += resume_problems(config) + speculation_problems(config, model)
    return found


def without_checkpoints(config: Config) -> Config:
    """For what starts from `model.path` in any case: evaluation, and the training of a drafter beforehand."""
    model = config.model.model_copy(update={"megatron_path": None})
    checkpoint = config.checkpoint.model_copy(update={"resume": "never"})
    return config.model_copy(update={"model": model, "checkpoint": checkpoint})


def _model(config: Config | SftConfig) -> ModelConfig | None:
    """The model's description; None if it is not here or cannot be read."""
    if missing_model(config) or model_problems(config):
        return None
    return ModelConfig.from_hf(config.model.path)


def model_problems(config: Config | SftConfig) -> list[ConfigProblem]:
    """A model directory on this machine whose config.json cannot be read or describes no supported model."""
    if missing_model(config):
        return []
    try:
        ModelConfig.from_hf(config.model.path)
    except CheckpointError as error:
        return [ConfigProblem("model.path", config.model.path, str(error))]
    return []


def missing_model(config: Config | SftConfig) -> list[ConfigProblem]:
    """A model directory that is not on this machine."""
    if (Path(config.model.path) / "config.json").is_file():
        return []
    allowed = "must be a Hugging Face directory with a config.json"
    return [ConfigProblem("model.path", config.model.path, allowed)]


def missing_files(config: Config | SftConfig) -> list[ConfigProblem]:
    """Model, drafter, prompts and records that are not on this machine."""
    problems = missing_model(config)
    if isinstance(config, SftConfig):
        named = {"sft.train_path": config.sft.train_path, "sft.eval_path": config.sft.eval_path}
    else:
        held_out = config.data.eval.path if config.data.eval is not None else None
        named = {"data.train.path": config.data.train.path, "data.eval.path": held_out}
        if config.rollout.speculation.trained:
            named[_DRAFTER_PATH] = config.rollout.speculation.drafter_path
        if config.rollout.backend == "trtllm":
            named["rollout.trtllm.python"] = config.rollout.trtllm.python
        if config.rollout.backend == "vllm":
            problems += python_problems(config.rollout.vllm)
        if config.checkpoint.resume not in ("auto", "never"):
            named["checkpoint.resume"] = config.checkpoint.resume
    named["model.megatron_path"] = config.model.megatron_path
    for field, path in named.items():
        if path is not None and not Path(path).exists():
            problems.append(ConfigProblem(field, path, "no such file or directory"))
    return problems


def resume_problems(config: Config) -> list[ConfigProblem]:
    """A checkpoint on this machine that a run is to resume from and cannot. Reads no tensor."""
    if not Path(config.checkpoint.resume).exists():
        return []
    return checkpoint_problems(config.checkpoint.resume)


def tokenizer_problems(config: Config | SftConfig) -> list[ConfigProblem]:
    """A directory on this machine that has no tokenizer."""
    field, source = "path", Path(config.model.path)
    if config.model.tokenizer:
        field, source = "tokenizer", Path(config.model.tokenizer)
    if not source.is_dir() or has_tokenizer(source):
        return []
    allowed = (
        "has no tokenizer files (tokenizer.json or its older kinds); model.tokenizer may name a directory"
    )
    return [ConfigProblem(f"model.{field}", str(source), allowed)]


def weight_problems(config: Config | SftConfig, shape: ModelConfig | None) -> list[ConfigProblem]:
    """Starting weights on this machine with a file missing, or of another model. Reads no weights.

    Without a `shape` (no model directory here) nothing is looked at; nor is what the run does not start from.
    """
    model = config.model
    if shape is None:
        return []
    try:
        if model.megatron_path is None:
            if problems := safetensors_problems(model.path):
                return [ConfigProblem("model.path", model.path, shortened(problems, separator="; "))]
        elif Path(model.megatron_path).exists():
            # Here, for it needs torch.
            from megatron_tlt.actor.torch_dist_reader import TorchDistReader

            TorchDistReader(model.megatron_path).check(shape)
    except (CheckpointError, OSError) as error:
        if model.megatron_path is None:
            return [ConfigProblem("model.path", model.path, str(error))]
        return [ConfigProblem("model.megatron_path", model.megatron_path, str(error))]
    return []


def speculation_problems(config: Config, shape: ModelConfig | None) -> list[ConfigProblem]:
    """A drafter on this machine that does not fit the policy of `shape` or was made for another one.

    Without a `shape` (no model directory here) it is not looked at.
    """
    section = config.rollout.speculation
    path = section.drafter_path
    if shape is None or section.trained is None or (path is not None and not Path(path).exists()):
        return []
    from megatron_tlt.drafter.checkpoint import drafter_problems  # here, for it needs torch

    return drafter_problems(section, shape, config.model.path)


def input_problems(config: Config | SftConfig) -> list[ConfigProblem]:
    """Prompts or records on this machine that cannot be read, and users' reward functions that cannot be imported."""
    problems: list[ConfigProblem] = []
    if isinstance(config, SftConfig):
        for field in ("train_path", "eval_path"):
            path = getattr(config.sft, field)
            if path is not None and Path(path).exists():
                problems += _record_problems(f"sft.{field}", path)
        return problems
    for name, source in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if source is not None and (source.path is None or Path(source.path).exists()):
            problems += source_problems(source, name)
    return problems + function_problems(config.rewards)


def _record_problems(field: str, path: str) -> list[ConfigProblem]:
    try:
        read_completions(Path(path))
    except DataError as error:
        return [ConfigProblem(field, path, str(error))]
    return []

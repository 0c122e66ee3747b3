"""Everything that can be wrong with a run, found at once and before any weight is loaded."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.actor.base_fingerprint import weight_fingerprints
from megatron_tlt.backends.trtllm import launch as trtllm_launch
from megatron_tlt.backends.vllm import launch as vllm_launch
from megatron_tlt.checkpoint.resume import resume_problems
from megatron_tlt.config.actor import ActorSection, OptimizerSection
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.base import places
from megatron_tlt.config.checks.files import output_directory_problems
from megatron_tlt.config.checks.layout import check_hosts, resolve_device
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.data import UNREAD
from megatron_tlt.config.planning.report import fits_line, render_check
from megatron_tlt.config.root import Config, TrainingConfig
from megatron_tlt.data.completions import read_completions
from megatron_tlt.data.hashing import digest
from megatron_tlt.data.hub import cached, names_of
from megatron_tlt.data.long_prompts import long_prompt_problems
from megatron_tlt.data.prompts import first_row, open_source, source_problems
from megatron_tlt.distributed.processors import mixed_processors, processor
from megatron_tlt.distributed.together import together
from megatron_tlt.envs.build import environment_problems
from megatron_tlt.envs.check import episode_problems
from megatron_tlt.errors import (
    CheckpointError,
    ConfigError,
    ConfigProblem,
    no_such_file,
    printable,
    shortened,
)
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import backend_problems, model_problems
from megatron_tlt.models.hf.peft import peft_problems
from megatron_tlt.observe.metrics import wandb_problems
from megatron_tlt.rewards.base import correct_line
from megatron_tlt.rewards.build import answer_problems, function_problems
from megatron_tlt.rewards.pool import trial_line
from megatron_tlt.trainer.chat_checks import chat_problems, prompt_renderer, unreadable_records
from megatron_tlt.trainer.device_memory import handle_problems
from megatron_tlt.trainer.environments import prompt_tools, reward_problems
from megatron_tlt.trainer.input_warnings import disk_warning, input_warnings
from megatron_tlt.trainer.teacher import teacher_problems, teacher_shape, with_teacher_shape
from megatron_tlt.trainer.token_checks import (
    long_records,
    record_problems,
    tokenizer_here,
    tokenizer_problems,
    turn_problems,
)
from megatron_tlt.types import BackendName, Prompt

if TYPE_CHECKING:
    from megatron_tlt.config.checks.layout import Device
    from megatron_tlt.config.model import ArchitectureConfig
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.distributed.world import World

_log = logging.getLogger(__name__)


def check_report(config: TrainingConfig, ranks: int | None, elsewhere: bool = False, all_rows: bool = False) -> str:
    """`megatron-tlt check`: the report, or ConfigError with every problem, those of the memory plan last.

    `elsewhere`: files that are not on this machine are warnings; where they are here they count. Where the model is
    not, `model.architecture` must say what is planned, or its name where to fetch it from. `all_rows`: see
    `render_check`.
    """
    num_ranks = ranks if ranks is not None else config.cluster.num_ranks
    config, described, to_fetch, problems = cached(config)
    config = with_teacher_shape(config, described.get("algorithm.teacher"))
    folder = described.get("model.path")
    named = {name.field for name in names_of(config)}
    missing = [problem for problem in missing_files(config) if problem.path not in named]
    problems += _problems(config, num_ranks, None, folder) + _problems_of_large_files(config, None)
    problems = problems or turn_problems(config)
    beyond, long = ([], []) if problems else long_records(config)
    problems += beyond
    rl = config.rl
    prompt = None if problems or rl is None else _first_prompt(rl)
    if rl is not None and rl.env is not None and prompt is not None:
        problems += episode_problems(rl.env, prompt)
    if config.model.architecture is None:  # nothing says what is planned
        problems += [p for p in missing if p.path == "model.path"]
        missing = [p for p in missing if p.path != "model.path"]
    if not elsewhere:
        hint = "; --elsewhere where it is on another machine"
        problems += [ConfigProblem(p.path, p.value, f"{p.allowed}{hint}") for p in missing]
    problems += place_problems(config, must_be_writable=False)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.path.startswith("cluster.")))
    model, _ = read_model("model.path", folder or config.model.path)
    shape = None if model is None else model.architecture
    absent = [f"warning: not on this machine: {p.path} = {p.value}" for p in missing] + _not_compared(config, shape)
    device = resolve_device(config, None)
    judged = [] if rl is None else _judged(rl, prompt)
    found = [*input_warnings(config, device, num_ranks), *long, *_unseen_drafter(config, shape)]
    warnings = [f"warning: {text}" for text in found]
    if device is None:
        positions = None if model is None else model.max_position_embeddings
        on_cpu = find_problems(config, shape, num_ranks, "cpu", positions)
        warnings += [f"warning: CPU ranks refuse to start: {problem}" for problem in on_cpu]
    report = render_check(config, shape, num_ranks, all_rows=all_rows)
    fits = fits_line(config, shape, num_ranks)
    return printable("\n".join([report, *judged, *to_fetch, *absent, *warnings, fits]))


def _judged(config: Config, prompt: Prompt | None) -> list[str]:
    """A line of what a correct response is; with a prompt one of the environment, whose episode was no problem, and one
    of users' reward functions, which run now.
    """
    played = "Environment: a scripted episode was the same three times, in two processes"
    tried = [] if prompt is None else ["" if config.env is None else played, trial_line(config.rewards, prompt)]
    return [*filter(None, [correct_line(config.rewards), *tried])]


def _not_compared(config: TrainingConfig, shape: ArchitectureConfig | None) -> list[str]:
    """What the memory plan rests on without a model's config.json; `shape`: as model.path has it."""
    found = []
    if shape is None:
        found.append("warning: the plan is of model.architecture, not compared with model.path")
    rl = config.rl
    if rl is not None and rl.algorithm.name == "distill" and not rl.algorithm.teacher_shape:
        found.append("warning: the memory plan lacks the teacher, whose config.json is not here")
    return found


def _unseen_drafter(config: TrainingConfig, shape: ArchitectureConfig | None) -> list[str]:
    """What the memory plan assumes of a drafter that is not on this machine."""
    if config.rl is None or (shape := shape or config.model.architecture) is None:
        return []
    section = config.rl.rollout.speculation
    if section.trained is None or section.drafter_path is None or Path(section.drafter_path).exists():
        return []
    tokens, at = section.drafted_tokens(shape.vocab_size), "rollout.speculation.draft_vocab_size"
    whose = f"{at}" if section.draft_vocab_size else f"the policy's vocabulary; {at} says another size"
    return [f"the drafter {section.drafter_path} is not here: the plan assumes {tokens} tokens ({whose})"]


def check_on(config: TrainingConfig, world: World, found_before: Sequence[ConfigProblem] = ()) -> None:
    """The checks on the world there is, where every file must be. Raises ConfigError with every problem."""
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    problems = [*found_before, *missing_files(config, device)]
    problems += _problems(config, world.size, device)
    problems += [] if config.rl is None else handle_problems(config.rl, world.device)
    hosts = world.all_gather_object(socket.gethostname())
    problems += check_hosts(config, hosts)
    problems += _hash_problems(config)
    # One rank looks into many files, which a run that goes on may be removing.
    problems += world.broadcast_object(_problems_of_large_files(config, device) if world.is_main else [])
    if problems or (problems := _problems_of_copies(config, world, hosts)):
        raise ConfigError(problems)
    mixed = mixed_processors(world.all_gather_object(processor(world.device)))
    if world.is_main:
        for text in [*input_warnings(config, device, world.size), mixed, disk_warning(config)]:
            if text is not None:
                _log.warning(text)


def _hash_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """Procedural tasks of which each rank would draw other items."""
    sources = [] if config.rl is None else [pair for pair in config.rl.data.sources if pair[1].tasks]
    if not sources:
        return []
    from megatron_tlt.data.tasks import hash_problems  # here, for reasoning-gym takes seconds

    return [problem for name, source in sources for problem in hash_problems(source.tasks, f"{name}.tasks")]


def _problems_of_copies(config: TrainingConfig, world: World, hosts: Sequence[str]) -> list[ConfigProblem]:
    """Weights and rows of which hosts have different copies: each rank reads its host's, and replicas would train
    apart. Of prompts' rows the prompts, answers and tools are compared, no other columns.

    `hosts`: of all ranks, of which the first of each host reads. Collective.
    """
    if len(set(hosts)) == 1:
        return []
    reads = hosts.index(hosts[world.rank]) == world.rank
    with together(world, "read weights and rows"):
        found = {"weights": weight_fingerprints(config), "rows": _row_fingerprints(config)} if reads else {}
    copies = [(host, copy) for host, copy in zip(hosts, world.all_gather_object(found), strict=True) if copy]
    first, own = copies[0]
    problems = []
    for what, files in own.items():
        for field, (path, mine) in files.items():
            if other := next((host for host, copy in copies if copy[what][field][1] != mine), None):
                allowed = f"hosts {first} and {other} hold different {what}: copy one's to all hosts, or share a disk"
                problems.append(ConfigProblem(field, path, allowed))
    return problems


def _row_fingerprints(config: TrainingConfig) -> dict[str, tuple[str, str]]:
    """Path and fingerprint of the prompts and records that each rank reads from files, by field."""
    found = {}
    if (rl := config.rl) is not None:
        for name, source in rl.data.sources:
            if source.path is not None:
                rows = open_source(source, name, 0, rl.data.system_prompt)
                found[f"{name}.path"] = source.path, rows.fingerprint
    if config.records is not None:
        for field, path, split in config.records.files:
            found[field] = path, digest(*map(digest, read_completions(config.records, Path(path), split)[0]))
    return found


def place_problems(config: TrainingConfig, must_be_writable: bool = True) -> list[ConfigProblem]:
    """Problems with the directory that a run, or fine-tuning, writes."""
    if config.records is None:
        return output_directory_problems("train.run_dir", str(config.state_dir), "train", (), must_be_writable)
    sources, anew = [place.value for place in places(config.model)], config.checkpoint.resume == "never"
    return output_directory_problems("sft.out", config.records.out, "sft", sources, must_be_writable, anew)


def _first_prompt(config: Config) -> Prompt | None:
    """The first training prompt, if the prompts are on this machine."""
    source = config.data.train
    if source.path is not None and not Path(source.path).exists():
        return None
    row = first_row(open_source(source, "data.train", 0, config.data.system_prompt))
    return Prompt(0, row.dataset_id, (), row.prompt, row.answer, row.task, row.metadata, seed=1)


def _problems(
    config: TrainingConfig, num_ranks: int, device: Device | None, described: str | None = None
) -> list[ConfigProblem]:
    """Of everything but large files. `described`: the directory of the model's config.json, where the model is not
    here.
    """
    model, unreadable = read_model("model.path", described or config.model.path)
    shape, positions = (None, None) if model is None else (model.architecture, model.max_position_embeddings)
    found = find_problems(config, shape, num_ranks, device, positions)
    if described or not missing_model(config):
        found += unreadable
    if config.rl is not None:
        found += teacher_problems(config.rl) + wandb_problems(config.rl.observe.wandb_project)
    if config.rl is not None and model is not None:
        found += backend_problems(Path(described or config.model.path) / "config.json", config.rl.rollout.backend)
    return found + tokenizer_problems(config) + chat_problems(config) + input_problems(config, device)


def _problems_of_large_files(config: TrainingConfig, device: Device | None) -> list[ConfigProblem]:
    """Of weights, also a teacher's, the checkpoint to resume from, the drafter and tokenized prompts, where they are
    on this machine.

    Of tensors it reads rows; three layers whole of a base of adapters in `model.megatron_path`.
    """
    shape, _ = read_model("model.path", config.model.path)
    found = [] if shape is None else _weight_problems(config, shape) + _adapter_problems(config, shape)
    found += resume_problems(config, shape, device)
    if (rl := config.rl) is None:
        return found + record_problems(config)
    found += long_prompt_problems(rl.data, tokenizer_here(config), prompt_tools(rl))
    if rl.algorithm.teacher is not None and (teacher := teacher_shape(rl)) is not None:
        found += _hf_weight_problems("algorithm.teacher", rl.algorithm.teacher, teacher)
    path = rl.rollout.speculation.drafter_path
    if shape is not None and (path is None or Path(path).exists()):
        model = config.model.path if config.reads_weights else None
        found += _drafter_problems(rl.rollout.speculation, shape, model, rl.rollout.backend)
    return found


def generation_problems(model: Path, prompts: Path, speculation: SpeculationSection) -> list[ConfigProblem]:
    """Input of `megatron-tlt generate` that is missing or damaged, and a drafter that does not fit the model."""
    shape, problems = read_model("--model", model)
    if shape is not None:
        problems += _hf_weight_problems("--model", model, shape) + _drafter_problems(speculation, shape, model)
    if not prompts.exists() or prompts.is_dir():  # a pipe will do
        problems.append(ConfigProblem("--prompts", str(prompts), no_such_file(prompts)))
    return problems


def without_training(config: Config, reads_prompts: bool) -> Config:
    """For what has an engine and no policy update: evaluation, and the training of a drafter beforehand. They start
    from `model.path` on any number of ranks that `rollout.tp` divides; the memory plan, of a run, has no limit.

    `reads_prompts`: whether `data.train` is read.
    """
    trains = config.idle.train_drafter and config.rollout.speculation.drafter_path is None
    changes: dict[str, dict[str, object]] = {
        "model": {"megatron_path": None},
        "checkpoint": {"resume": "never"},
        "train": {"num_steps": 0},
        "data": {} if reads_prompts else {"train": UNREAD},
        "cluster": {"memory_gib": None, "host_memory_gib": math.inf},
        # A drafter that is not named is made from the policy, as in a run that trains it. No call brings drafts.
        "idle": {"train_drafter": trains, "min_steps_per_window": 1, "pre_rollout": False},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    unused = {"actor": ActorSection(), "algorithm": AlgorithmSection(), "optimizer": OptimizerSection()}
    return config.model_copy(update={**sections, **unused})


def read_model(field: str, path: str | Path) -> tuple[ModelConfig | None, list[ConfigProblem]]:
    """A model's description, or None and why there is none: no directory here, not readable, or not supported."""
    if not (Path(path) / "config.json").is_file():
        why = "it has none" if Path(path).is_dir() else no_such_file(path)
        return None, [ConfigProblem(field, str(path), f"must be a Hugging Face directory with a config.json: {why}")]
    try:
        return ModelConfig.from_hf(path), []
    except CheckpointError as error:
        return None, [ConfigProblem(field, str(path), str(error))]


def missing_model(config: TrainingConfig) -> list[ConfigProblem]:
    """A model directory that is not on this machine."""
    if (Path(config.model.path) / "config.json").is_file():
        return []
    return read_model("model.path", config.model.path)[1]


def missing_files(config: TrainingConfig, device: Device | None = None) -> list[ConfigProblem]:
    """Files and directories of a configuration that are not on this machine; of a model's, its config.json."""
    problems = missing_model(config)
    found_elsewhere = ("model.path", "model.tokenizer")  # the latter by `tokenizer_problems`
    named = {place.field: place.value for place in places(config) if place.field not in found_elsewhere}
    rollout = None if config.rl is None else config.rl.rollout
    if rollout is not None and rollout.backend == "vllm":
        problems += vllm_launch.launch_problems(rollout.vllm, resolve_device(config, device))
    elif rollout is not None and rollout.backend == "trtllm":
        problems += trtllm_launch.launch_problems(rollout.trtllm)
    absent = [(field, path) for field, path in named.items() if not Path(path).exists()]
    return problems + [ConfigProblem(field, path, no_such_file(path)) for field, path in absent]


def _hf_weight_problems(
    field: str, path: str | Path, shape: ModelConfig, adapter: str | None = None
) -> list[ConfigProblem]:
    """Weight files of a Hugging Face directory that are missing, truncated, or not what its config.json says."""
    texts = model_problems(path, shape, adapter)
    return [ConfigProblem(field, str(path), shortened(texts, separator="; "))] if texts else []


def _weight_problems(config: TrainingConfig, shape: ModelConfig) -> list[ConfigProblem]:
    """Weights on this machine that a run starts from, with a file missing or of another model."""
    model, lora = config.model, config.actor.lora
    found = []
    if config.reads_weights:
        adapter = None if lora is None else lora.adapter_path
        found = _hf_weight_problems("model.path", model.path, shape, adapter)
    if model.megatron_path is None or not Path(model.megatron_path).exists():
        return found
    from megatron_tlt.actor.torch_dist_reader import TorchDistReader  # here, for it needs torch

    try:
        TorchDistReader(model.megatron_path).check(shape)
    except (CheckpointError, OSError) as error:
        found.append(ConfigProblem("model.megatron_path", model.megatron_path, str(error)))
    return found


def _adapter_problems(config: TrainingConfig, shape: ModelConfig) -> list[ConfigProblem]:
    """Adapters on this machine that a run starts from, and that are others than the configured ones."""
    lora = config.actor.lora
    if lora is None or lora.adapter_path is None or not Path(lora.adapter_path).exists():
        return []
    from megatron_tlt.actor.hf_names import adapter_slots  # here, for it needs torch

    shapes = {slot.hf_names[0]: size for slot, size in adapter_slots(shape, lora, 1).items()}
    return peft_problems(lora, shape, shapes)


def _drafter_problems(
    section: SpeculationSection, shape: ModelConfig, model: str | Path | None, backend: BackendName = "embedded"
) -> list[ConfigProblem]:
    """A trained drafter that does not fit the model of `shape` in `model`, or was made for another one (None: not
    compared), or is of a form that the rollout engine lacks.
    """
    if section.trained is None:
        return []
    from megatron_tlt.drafters.checkpoint import drafter_problems  # here, for it needs torch

    return drafter_problems(section, shape, model, backend)


def input_problems(config: TrainingConfig, device: Device | None = None) -> list[ConfigProblem]:
    """Prompts or records on this machine that cannot be read, users' reward functions and environments that cannot be
    imported, and a compiler that is missing; `device`: of the ranks, where it is known.
    """
    problems = _machine_problems(config, device)
    render, _ = prompt_renderer(config)
    if (rl := config.rl) is not None:
        tools, compare = prompt_tools(rl), partial(answer_problems, rl.rewards)
        for name, source in rl.data.sources:
            if source.is_here or source.kind == "env" or (source.kind == "tasks" and source.tasks):
                problems += source_problems(source, name, render, tools, rl.data.system_prompt, compare)
        if rl.env is not None and rl.env.is_named:
            problems += environment_problems(rl.env) or reward_problems(rl)
        problems += function_problems(rl.rewards)
    return problems if config.records is None else problems + unreadable_records(config.records, render)


def _machine_problems(config: TrainingConfig, device: Device | None) -> list[ConfigProblem]:
    """Parts of a run that are compiled on this machine, which lacks what that needs."""
    from megatron_tlt.models.decoders.native.build import missing_for_native, missing_for_triton

    problems, rl = [], config.rl
    # Megatron's fused functions, and the embedded engine's kernels.
    has_triton = device == "cuda" and (rl is None or rl.train.num_steps > 0 or rl.rollout.kernels == "auto")
    if has_triton and (missing := missing_for_triton()) is not None:
        allowed = f"on CUDA every node needs a C compiler and Python's headers, for Triton: {missing}"
        problems.append(ConfigProblem("distributed.device", config.distributed.device, allowed))
    if rl is None or rl.rollout.backend != "embedded" or (missing := missing_for_native()) is None:
        return problems
    if rl.rollout.speculation.drafter == "suffix":
        needed = missing.partition(";")[0]
        problems.append(ConfigProblem("rollout.speculation.drafter", "suffix", needed))
    kernels = rl.rollout.kernels
    if kernels == "native" or (kernels == "auto" and resolve_device(config, device) == "cpu"):
        problems.append(ConfigProblem("rollout.kernels", kernels, missing))
    return problems

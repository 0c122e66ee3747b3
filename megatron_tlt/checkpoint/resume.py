"""Which checkpoint a run resumes from (`checkpoint.resume`)."""

from __future__ import annotations

import errno
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.actor.checkpoint_files import model_record, training_record
from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.drafters.checkpoint import configured_drafter, drafter_differences
from megatron_tlt.drafters.state_file import DRAFTER_STATE, load_drafter_state
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem, shortened
from megatron_tlt.observe.jsonl import read_rows
from megatron_tlt.observe.metrics import METRICS_FILE

if TYPE_CHECKING:
    from megatron_tlt.config.checks.layout import Device
    from megatron_tlt.distributed.world import World
    from megatron_tlt.models.hf.config import ModelConfig

_log = logging.getLogger(__name__)

# Of a file that stays unreadable; others, of a network's file system for example, may pass, and end the start.
_UNREADABLE = (errno.EIO, errno.EACCES, errno.EPERM)


def checkpoint_problems(resume: str) -> list[ConfigProblem]:
    """Why the checkpoint that `checkpoint.resume` names cannot be used, from names and sizes of its files alone."""
    if resume in ("auto", "never"):
        return []
    directory = Path(resume)
    try:
        files.step_of(directory)
        problem = files.damage_of(directory, checksums=False)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    return [ConfigProblem("checkpoint.resume", resume, problem)] if problem else []


def checkpoint_to_resume(config: TrainingConfig) -> tuple[Path, files.Manifest] | None:
    """The checkpoint that a start would load, and its record, its files unread; None: a start from the initial weights.

    One without a readable record is left to `find_checkpoint`, which passes it over or refuses it.
    """
    for directory in _candidates(config.state_dir / "checkpoints", config.checkpoint.resume):
        with suppress(CheckpointError, OSError):
            return directory, files.read_manifest(directory)
    return None


def resume_problems(config: TrainingConfig, shape: ModelConfig | None, device: Device | None) -> list[ConfigProblem]:
    """Why a start cannot go on from the checkpoint of `checkpoint.resume`, from its record and the sizes of its files.

    `shape`: of the model in `model.path`, None where that is not on this machine. `device`: of the ranks, None where it
    is not known.
    """
    resume, model = config.checkpoint.resume, config.model
    if Path(resume).exists() and (problems := checkpoint_problems(resume) or _mixed_runs(config)):
        return problems
    if shape is None or (resumed := checkpoint_to_resume(config)) is None:
        return []
    directory, found = resumed
    shards = config.actor.shards_optimizer(config.optimizer, device == "cuda")
    base = base_fingerprint(model, shape) if config.actor.lora is not None else ""
    wanted = model_record(shape) | training_record(config.actor, config.optimizer.name, shards, base)
    if not base or found.training.get("lora") == "off":
        del wanted["base"]  # of adapters, whose base can be read here
    if device is None and config.actor.distributed_optimizer == "auto":
        del wanted["distributed_optimizer"]
    is_sft, problems = "sft" in found.extra, []
    if is_sft != (config.records is not None):
        origin = "`sft`: its result is what a run starts from" if is_sft else "an RL run, not of `sft`"
        return [ConfigProblem("checkpoint.resume", resume, f"the checkpoint of step {found.step} is of {origin}")]
    wrong = [*files.model_differences({**found.model, **found.training}, wanted), *_other_schedule(config, found)]
    if wrong := wrong or _other_drafter(config, shape, directory):
        allowed = (
            f"the checkpoint of step {found.step} does not fit this run: {'; '.join(wrong)} "
            "(restore these settings, or start anew with checkpoint.resume=never or in another directory)"
        )
        problems.append(ConfigProblem("checkpoint.resume", resume, allowed))
    if config.records is not None and found.step > config.records.num_steps:
        allowed = f"must be at least {found.step}, the checkpoint's step"
        problems.append(ConfigProblem("sft.num_steps", config.records.num_steps, allowed))
    return problems


def schedule_warning(config: TrainingConfig) -> str | None:
    """The warning where a start goes on from a checkpoint of a shorter or longer run, whose learning rate there is
    another one: a decaying schedule ends with the run. None where it is not.
    """
    if (resumed := checkpoint_to_resume(config)) is None:
        return None
    _, found = resumed
    total, before = config.optimizer_steps, found.extra["total_optimizer_steps"]
    old, new = (config.optimizer.rate.at(found.optimizer_steps, steps) for steps in (before, total))
    if old == new:
        return None
    return (
        f"optimizer.schedule = {config.optimizer.schedule} ends with the run, now after {total} optimizer steps, "
        f"by the checkpoint after {before}: at step {found.step} the learning rate goes from {old:.3g} to {new:.3g}"
    )


def removal_warning(config: TrainingConfig) -> str | None:
    """The warning where a start does not go on from the run's newest checkpoint: those of later steps are removed. None
    where there are none.
    """
    resume, own = config.checkpoint.resume, config.state_dir / "checkpoints"
    try:
        start = max((files.step_of(path) for path in _candidates(own, resume)), default=0)
    except CheckpointError:  # on another machine, which refuses the name
        return None
    if config.rl is not None and start >= config.rl.train.num_steps:
        return None  # it is evaluated at most
    if not (later := [path.name for path in files.complete_steps(own) if files.step_of(path) > start]):
        return None
    return (
        f"checkpoint.resume = {resume} goes on after step {start}: the rows of later steps are removed at once, by "
        f"the first save {shortened(later[::-1])} of {config.state_dir}; another directory keeps them"
    )


def _mixed_runs(config: TrainingConfig) -> list[ConfigProblem]:
    """The problem with another run's checkpoint behind rows of earlier steps, which metrics would have as its own.

    Rows from its step on are those of an earlier start from it.
    """
    resume, run_dir = Path(config.checkpoint.resume), config.state_dir
    if config.rl is None or run_dir.resolve() == resume.absolute().parent.parent.resolve():
        return []
    first = next((row.get("step") or 0 for row in read_rows(run_dir / METRICS_FILE)), math.inf)
    if first >= files.step_of(resume):
        return []
    allowed = f"must be in {run_dir / 'checkpoints'}, or train.run_dir another: {run_dir} has rows from step {first} on"
    return [ConfigProblem("checkpoint.resume", config.checkpoint.resume, allowed)]


def _other_schedule(config: TrainingConfig, found: files.Manifest) -> list[str]:
    """A number of updates a step, other than the checkpoint's, with which a decaying learning rate would be elsewhere:
    the position on its schedule is a count of updates, its length that of all steps.
    """
    if config.rl is None or config.optimizer.schedule == "constant":
        return []
    there, own = found.extra.get("mini_batches"), config.rl.algorithm.mini_batches
    if there == own:
        return []
    counted = f"optimizer.schedule = {config.optimizer.schedule} counts updates"
    return [f"algorithm.mini_batches is {there}, not {own}, and {counted}"]


def _other_drafter(config: TrainingConfig, shape: ModelConfig, checkpoint: Path) -> list[str]:
    """How the drafter in `checkpoint` differs from the configured one; nothing where either is not there or unreadable,
    which others say.
    """
    if config.rl is None or not (file := checkpoint / DRAFTER_STATE).is_file():
        return []
    try:
        wanted = configured_drafter(config.rl.rollout.speculation, shape)
        about = load_drafter_state(file, with_tensors=False)["about"]
    except (CheckpointError, ConfigError):
        return []
    return [] if wanted is None else drafter_differences(about, wanted)


def find_checkpoint(world: World, checkpoints: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, verified file by file; None to start from the initial weights. Collective.

    `resume` is "never", "auto" or the path of one checkpoint. With auto, a damaged checkpoint is skipped with a
    warning for the one before it. Raises CheckpointError when one that is named by its path is damaged (the error names
    the newest good one), or when there are checkpoints and all are damaged.
    """
    if resume not in ("auto", "never"):
        named = Path(resume)
        problem = _problem(world, named)
        if problem is None:
            return named
        others = [path for path in files.complete_steps(named.parent) if path.name != named.name]
        good = next((path for path in others if _problem(world, path) is None), None)
        offer = f"use {good}, which is whole" if good else "no other checkpoint beside it is whole"
        raise CheckpointError(f"{problem}; {offer}")
    candidates: list[Path] = world.broadcast_object(_candidates(checkpoints, resume) if world.is_main else None)
    for candidate in candidates:
        problem = _problem(world, candidate)
        if problem is None:
            return candidate
        if world.is_main:
            is_last = candidate == candidates[-1]
            after = "There is none before it." if is_last else "Falling back to the checkpoint before it."
            _log.warning("REFUSED: %s. %s", problem, after)
    if candidates:
        raise CheckpointError(
            f"every checkpoint in {checkpoints} is damaged (train with checkpoint.resume=never starts anew)"
        )
    return None


def _candidates(checkpoints: Path, resume: str) -> list[Path]:
    """The checkpoint that `resume` names. With auto that of `latest`, then all older ones, newest first (all, where it
    names none).
    """
    if resume != "auto":
        return [] if resume == "never" else [Path(resume)]
    steps = files.complete_steps(checkpoints)
    latest = files.read_latest(checkpoints)
    if latest is None:
        if (checkpoints / files.LATEST).exists():
            _log.warning("%s names no checkpoint: the newest one is taken", checkpoints / files.LATEST)
        return steps
    older = [path for path in steps if files.step_of(path) < files.step_of(latest)]
    return [latest, *older] if files.step_of(latest) else []


def _problem(world: World, directory: Path) -> str | None:
    """Why a checkpoint cannot be used, the same on every rank; None if it can. Ranks share the reading. Collective."""
    try:
        own = files.damage_of(directory, world.rank, world.size, on_file=world.heartbeat)
    except CheckpointError as error:
        own = str(error)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        own = f"checkpoint {directory} cannot be read: {error}"
    world.wait_for_all()  # a rank's share of the files may take longer than a collective may
    return next((problem for problem in world.all_gather_object(own) if problem), None)

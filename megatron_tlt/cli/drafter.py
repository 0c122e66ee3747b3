"""`megatron-tlt drafter train|eval`: making the trained drafter of a run's model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_job, run_on_every_rank
from megatron_tlt.config.checks.commands import base_warning, check_base, check_drafter_engine, check_held_out
from megatron_tlt.config.checks.files import output_directory_problems, output_file_problems
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.resilience.signals import StopSignals

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.base import SavedDrafter
    from megatron_tlt.drafters.model import DrafterConfig

MEASURED = rb'\{\n  "bases": '  # how the result of `drafter eval` begins
Body = Callable[["Config", "World", "argparse.Namespace"], int]
_log = logging.getLogger(__name__)


def add_drafter(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "make and measure the trained drafter of a config's model"
    parser = commands.add_parser("drafter", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, body: Body, about: str) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
        add_config(action, "YAML file of an RL run")
        action.set_defaults(run=lambda args: _run(body, args))
        return action

    train = add("train", _train, "train it on responses of the model, generated or from files; a stopped one goes on")
    measured = add("eval", _eval, "measure its acceptance on the config's held-out prompts")
    train.add_argument("--out", type=Path, required=True, help="directory to write")
    train.add_argument("--drafter", type=Path, help="start from this directory or OWNER/NAME, not from fresh weights")
    measured.add_argument("--drafter", type=Path, required=True, help="its directory, or OWNER/NAME on the hub")
    measured.add_argument("--out", type=Path, help="also write the result as JSON")


def _run(body: Body, args: argparse.Namespace) -> int:
    args.signals = StopSignals().install() if args.action == "train" else None  # importing the rest takes seconds
    from megatron_tlt.config.root import Config
    from megatron_tlt.config.run import UNFINISHED
    from megatron_tlt.data.hub import fetch_argument, on_this_machine
    from megatron_tlt.trainer.chat_settings import with_date

    config = read_config(args, Config)
    sources = config.model.path, config.model.tokenizer, args.drafter
    if args.action == "eval":
        problems = output_file_problems("--out", args.out, MEASURED, (*sources, args.config))
    else:
        anew = config.checkpoint.resume == "never"
        problems = output_directory_problems("--out", args.out, "drafter train", sources, replaces=anew)
    if problems:
        raise ConfigError(problems)
    unfinished = args.out / UNFINISHED if args.action == "train" else None

    def start(world: World) -> int:
        from megatron_tlt.trainer.drafter_training import recorded_drafter  # it imports torch

        is_eval, reads = args.action == "eval", _read_part(config, args)
        here = on_this_machine(config, world, state_dir=unfinished, as_named=is_eval, reads=reads)
        if args.drafter is not None:
            recorded = None if is_eval else recorded_drafter(config, args.out)
            args.drafter = fetch_argument("--drafter", args.drafter, world, "drafter", recorded)
        return body(with_date(here, world, unfinished), world, args)

    return run_on_every_rank(config.distributed, cpu_threads(), start)


def _train(config: Config, world: World, args: argparse.Namespace) -> int:
    from megatron_tlt.trainer.drafter_training import DrafterJob, open_pretraining, training_settings

    start = partial(open_pretraining, *_checked(config, world, args, []), world)
    settings = training_settings(config, args.drafter, world.size)
    return run_job(DrafterJob(config, world, args.out, settings, start, args.signals))


def _eval(config: Config, world: World, args: argparse.Namespace) -> int:
    from megatron_tlt.drafters.training.pretrain import held_out_params
    from megatron_tlt.trainer.drafter_training import held_out, open_pretraining
    from megatron_tlt.trainer.models import push_policy, tensor_parallel
    from megatron_tlt.trainer.sampling import sampling_params

    checked = _checked(config, world, args, [*check_held_out(config)])
    pretraining, backend = open_pretraining(*checked, world, tensor_parallel(world, config.rollout.tp))
    world.enter("load")
    push_policy(config.model.path, backend, world, config.sync)
    params = held_out_params(sampling_params(config))
    result = pretraining.measure(pretraining.generate(held_out(config), 1, params, backend.generate))
    if world.is_main:
        print(result.table(), flush=True)
        if args.out is not None:
            write_atomically(args.out, [json.dumps(result.to_json(), indent=2)])
    return OK


def _read_part(config: Config, args: argparse.Namespace) -> Config:
    """The configuration without what this command does not read: drafts, rewards, and the policy's training."""
    from megatron_tlt.config.data import RewardConfig, RewardSection
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.trainer.preflight import without_training

    plain = config.rollout.model_copy(update={"speculation": SpeculationSection()})
    waiting = config.idle.model_copy(update={"train_drafter": False})
    # Of those of the run nothing is read, and their files may be elsewhere.
    any_rewards = RewardSection(functions=(RewardConfig(name="format", pattern=""),))
    plain_config = config.model_copy(update={"rollout": plain, "idle": waiting, "rewards": any_rewards})
    generates = args.action == "train" and config.drafter.responses_path is None
    return without_training(plain_config, reads_prompts=generates)


def _checked(
    config: Config, world: World, args: argparse.Namespace, found: list[ConfigProblem]
) -> tuple[Config, DrafterConfig, SavedDrafter | None]:
    """The configuration without speculation, the drafter to train or measure, and the saved one that it starts from.

    Raises ConfigError with all problems, `found` ones too, of a model or a drafter that cannot be; loads no weights of
    the model.
    """
    from megatron_tlt.drafters.checkpoint import drafter_shape
    from megatron_tlt.models.hf.config import ModelConfig
    from megatron_tlt.trainer.preflight import check_on

    speculation, found = config.rollout.speculation, [*check_drafter_engine(config), *check_base(config), *found]
    unread, config = base_warning(config), _read_part(config, args)
    check_on(config, world, found)
    if world.is_main and unread is not None:
        _log.warning(unread)
    if args.drafter is None:
        return config, drafter_shape(speculation, ModelConfig.from_hf(config.model.path)), None
    may_be_other = args.action == "train" or speculation.allow_other_policy
    start = _load(args.drafter, config, speculation, world, may_be_other)
    return config, start.config, start


def _load(
    directory: Path, config: Config, wanted: SpeculationSection, world: World, may_be_other: bool
) -> SavedDrafter:
    """The drafter in `directory`; rank 0 logs what of it is guessed. Raises ConfigError if it does not fit, or was made
    for another policy.
    """
    from megatron_tlt.drafters.checkpoint import drafter_warnings, load_drafter, other_policy_problems
    from megatron_tlt.models.hf.config import ModelConfig

    model, policy = config.model, ModelConfig.from_hf(config.model.path)
    try:
        drafter = load_drafter(directory, policy, wanted)
    except CheckpointError as error:
        raise ConfigError.of("--drafter", str(directory), str(error)) from error
    problems = []
    if world.is_main and not may_be_other:
        problems = other_policy_problems("--drafter", directory, drafter, model.path)
    if problems := world.broadcast_object(problems):
        raise ConfigError(problems)
    for text in drafter_warnings(wanted, policy, directory) if world.is_main else ():
        _log.warning(text)
    return drafter

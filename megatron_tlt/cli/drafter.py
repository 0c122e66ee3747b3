"""`megatron-tlt drafter train|eval`: making the trained drafter of a run's model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.checks.commands import check_drafter_engine, check_held_out
from megatron_tlt.config.checks.files import output_directory_problems, output_file_problems
from megatron_tlt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.kinds.base import SavedDrafter
    from megatron_tlt.drafter.pretrain import DrafterPretraining
    from megatron_tlt.types import Prompt

Body = Callable[["Config", "World", "argparse.Namespace"], None]


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

    train = add("train", _train, "train it on responses of the model to the config's training prompts")
    measured = add("eval", _eval, "measure its acceptance on the config's held-out prompts")
    train.add_argument("--out", type=Path, required=True, help="directory to write")
    train.add_argument("--drafter", type=Path, help="start from this drafter, not from fresh weights")
    measured.add_argument("--drafter", type=Path, required=True, help="directory of the drafter")
    measured.add_argument("--out", type=Path, help="also write the result as JSON")


def _run(body: Body, args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.hub import on_this_machine

    config = read_config(args, Config)
    check_out = output_file_problems if args.action == "eval" else output_directory_problems
    if problems := check_out("--out", args.out):
        raise ConfigError(problems)
    return run_on_every_rank(
        config.distributed, config.rollout.threads, lambda world: body(on_this_machine(config, world), world, args)
    )


def _train(config: Config, world: World, args: argparse.Namespace) -> None:
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.trainer.setup import open_tokenizer

    pretraining = _pretraining(config, world, args)
    stream = build_prompts(config.data, "train", open_tokenizer(config), config.train.seed)
    prompts = stream.next_batch(config.drafter.num_prompts)
    result = pretraining.train(prompts, _held_out(config), args.out)
    if world.is_main:
        print(result.table() if result.bases else "no held-out prompts (data.eval): not measured")
        print(f"wrote {args.out}", flush=True)


def _eval(config: Config, world: World, args: argparse.Namespace) -> None:
    pretraining = _pretraining(config, world, args)
    result = pretraining.measure(pretraining.held_out(_held_out(config)))
    if world.is_main:
        print(result.table(), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def _pretraining(config: Config, world: World, args: argparse.Namespace) -> DrafterPretraining:
    """The drafter to train or measure, and the engine with the model's weights, without speculation.

    Raises ConfigError for a model or a drafter that cannot be, before weights are loaded.
    """
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.drafter.checkpoint import drafter_shape
    from megatron_tlt.drafter.pretrain import DrafterPretraining
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.loader import iter_weights
    from megatron_tlt.sync.push import BucketedSync
    from megatron_tlt.trainer.models import open_backend
    from megatron_tlt.trainer.preflight import check_on, without_checkpoints
    from megatron_tlt.trainer.sampling import sampling_params
    from megatron_tlt.trainer.setup import open_tokenizer

    speculation = config.rollout.speculation
    may_be_other = args.action == "train" or speculation.allow_other_policy
    plain = config.rollout.model_copy(update={"speculation": SpeculationSection()})
    waiting = config.idle.model_copy(update={"train_drafter": False})
    config = without_checkpoints(config.model_copy(update={"rollout": plain, "idle": waiting}))
    held_out = [] if args.action == "train" else [*check_held_out(config)]
    check_on(config, world, [*check_drafter_engine(config), *held_out])
    path = config.model.path
    policy = ModelConfig.from_hf(config.model.path)
    start = None
    if args.drafter is not None:
        start = _load(args.drafter, config, speculation, world, may_be_other)
    drafter = drafter_shape(speculation, policy) if start is None else start.config
    tokenizer = open_tokenizer(config)
    layers = drafter.aux_layers
    backend = open_backend(config, world, tokenizer, keep_layers=layers)
    world.enter("load")
    BucketedSync(config.sync, backend, world).push(iter_weights(path, policy), version=0)
    return DrafterPretraining(config, world, backend, sampling_params(config), drafter, start)


def _load(
    directory: Path, config: Config, wanted: SpeculationSection, world: World, may_be_other: bool
) -> SavedDrafter:
    """The drafter in `directory`. Raises ConfigError if it does not fit, or was made for another policy."""
    from megatron_tlt.drafter.checkpoint import load_drafter
    from megatron_tlt.drafter.fingerprint import other_policy_problem
    from megatron_tlt.models.config import ModelConfig

    model = config.model
    try:
        drafter = load_drafter(directory, ModelConfig.from_hf(model.path), wanted)
    except CheckpointError as error:
        raise ConfigError.of("--drafter", str(directory), str(error)) from error
    problem = None
    if world.is_main and not may_be_other:
        problem = other_policy_problem("--drafter", directory, drafter.fingerprint, model.path)
    if problem := world.broadcast_object(problem):
        raise ConfigError(problem)
    return drafter


def _held_out(config: Config) -> list[Prompt]:
    """The held-out prompts; none without `data.eval`."""
    from megatron_tlt.data.prompts import held_out_prompts
    from megatron_tlt.trainer.setup import open_tokenizer

    return held_out_prompts(config.data, open_tokenizer(config), config.drafter.eval_prompts)

"""`megatron-tlt drafter init|train|eval`: making the eagle drafter of a run's model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.pretrain import DrafterWarmUp
    from megatron_tlt.models.eagle.eagle3 import Eagle3Config

Body = Callable[["Config", "World", "argparse.Namespace"], None]


def add_drafter(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "make and measure the eagle drafter of a config's model"
    parser = commands.add_parser("drafter", help=text, description=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, body, help_text in (
        ("init", _init, "write a drafter with fresh weights"),
        ("train", _train, "train it on answers of the model to the config's training prompts"),
        ("eval", _eval, "measure its acceptance on the config's held-out prompts"),
    ):
        action = actions.add_parser(name, help=help_text, description=help_text)
        action.add_argument("config", type=Path, help="YAML file of an RL run")
        action.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")
        if name != "init":
            start = (
                "directory of the drafter"
                if name == "eval"
                else "start from this drafter, not from fresh weights"
            )
            action.add_argument("--drafter", type=Path, required=name == "eval", help=start)
        if name == "train":
            action.add_argument(
                "--kind",
                choices=("eagle", "eagle3"),
                help="eagle (default): for rollouts; eagle3: for serving",
            )
            action.add_argument("--layers", type=_ids, help="eagle3: policy layers to read, as 1,5,8")
            action.add_argument(
                "--draft-vocab", type=int, help="eagle3: draft only this many tokens (default all)"
            )
        about = "also write the result as JSON" if name == "eval" else "directory to write"
        action.add_argument("--out", type=Path, required=name != "eval", help=about)
        action.set_defaults(run=_command(body))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _command(body: Body) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from megatron_tlt.config.load import load_config
        from megatron_tlt.config.root import Config

        config = load_config(args.config, args.overrides, Config)
        return run_on_every_rank(
            config.distributed, config.rollout.threads, lambda world: body(config, world, args)
        )

    return run


def _init(config: Config, world: World, args: argparse.Namespace) -> None:
    from megatron_tlt.drafter.checkpoint import save_drafter
    from megatron_tlt.models.base import DTYPES
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.eagle.model import EagleModel

    shape = ModelConfig.from_hf(config.model.path)
    if world.is_main:
        model = EagleModel(shape)
        model.initialise(config.drafter.seed)
        save_drafter(args.out, shape, model.state_dict(), dtype=DTYPES[config.drafter.save_dtype])
        print(f"wrote {args.out} (untrained)", flush=True)


def _train(config: Config, world: World, args: argparse.Namespace) -> None:
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.trainer.setup import open_tokenizer

    warm_up = _warm_up(config, world, args)
    warm_up.start(args.drafter, config.drafter.seed)
    tokenizer = open_tokenizer(config)
    prompts = build_prompts(config.data, "train", tokenizer, config.train.seed).next_batch(
        config.drafter.num_prompts
    )
    result = warm_up.train(prompts, _held_out(config, required=False), args.out)
    if world.is_main:
        print(result.table() if result.bases else "no held-out prompts (data.eval): not measured")
        print(f"wrote {args.out}", flush=True)


def _eval(config: Config, world: World, args: argparse.Namespace) -> None:
    prompts = _held_out(config, required=True)
    warm_up = _warm_up(config, world, args)
    warm_up.start(args.drafter, config.drafter.seed)
    result = warm_up.measure(warm_up.held_out(prompts))
    if world.is_main:
        print(result.table(), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def _warm_up(config: Config, world: World, args: argparse.Namespace) -> DrafterWarmUp:
    """The engine with the model's weights, without speculation: it is what the drafter learns from."""
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.drafter.eagle3.pretrain import Eagle3WarmUp
    from megatron_tlt.drafter.pretrain import DrafterWarmUp
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.loader import iter_weights
    from megatron_tlt.sync.push import BucketedSync
    from megatron_tlt.trainer.preflight import check_on, without_megatron
    from megatron_tlt.trainer.setup import open_backend, open_tokenizer, sampling_params

    shape = _eagle3_shape(config, args)
    plain = config.rollout.model_copy(update={"speculation": SpeculationSection()})
    waiting = config.idle.model_copy(update={"train_drafter": False})
    config = config.model_copy(update={"rollout": plain, "idle": waiting})
    if config.rollout.backend != "embedded":
        allowed = "must be 'embedded' here: a drafter learns from the policy's hidden states"
        raise ConfigError.of("rollout.backend", config.rollout.backend, allowed)
    check_on(without_megatron(config), world)
    backend = open_backend(config, world, open_tokenizer(config))
    world.enter("load")
    path = config.model.path
    assert isinstance(backend, EmbeddedBackend), "checked above"
    BucketedSync(config.sync, backend, world).push(iter_weights(path, ModelConfig.from_hf(path)), version=0)
    if shape is not None:
        return Eagle3WarmUp(config, world, backend, sampling_params(config), shape)
    return DrafterWarmUp(config, world, backend, sampling_params(config))


def _eagle3_shape(config: Config, args: argparse.Namespace) -> Eagle3Config | None:
    """The drafter to train or measure if it is of kind eagle3: the given one's, or that of the options."""
    from megatron_tlt.drafter.export.eagle3 import KIND3, load_eagle3
    from megatron_tlt.drafter.export.files import read_about, refuse_existing
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.eagle.eagle3 import Eagle3Config

    kind, layers, vocab = (getattr(args, name, None) for name in ("kind", "layers", "draft_vocab"))
    about = read_about(args.drafter) if args.drafter is not None else {"drafter": kind or "eagle"}
    if kind not in (None, about["drafter"]):
        raise ConfigError.of("--kind", kind, f"{args.drafter} is of kind {about['drafter']}")
    fresh = about["drafter"] == KIND3 and args.drafter is None
    for name, value in (("--layers", layers), ("--draft-vocab", vocab)):
        if value is not None and not fresh:
            raise ConfigError.of(name, value, "is for a fresh drafter of kind eagle3")
    if about["drafter"] != KIND3:
        return None
    if args.action == "train":
        refuse_existing(args.out)  # before the work, not after it
    if fresh:
        return Eagle3Config.of(ModelConfig.from_hf(config.model.path), layers, vocab)
    return load_eagle3(args.drafter, about)[0]


def _held_out(config: Config, required: bool) -> list[Any]:
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.trainer.setup import open_tokenizer

    if config.data.eval is None:
        if required:
            raise ConfigError.of("data.eval", None, "measuring a drafter needs held-out prompts")
        return []
    stream = build_prompts(config.data, "eval", open_tokenizer(config), config.train.seed)
    return stream.next_batch(config.drafter.eval_prompts)

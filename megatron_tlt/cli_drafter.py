"""`megatron-tlt drafter init|train|eval`: making the eagle drafter of a run's model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.warmup import DrafterWarmUp

OnEveryRank = Callable[[Any, int | None, Callable[["World"], None]], int]
Body = Callable[["Config", "World", "argparse.Namespace"], None]


def add_drafter(commands: Any, on_every_rank: OnEveryRank) -> None:
    """Adds the command to the parser; `on_every_rank(section, threads, body)` is how the command line starts ranks."""
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
        about = "also write the result as JSON" if name == "eval" else "directory to write"
        action.add_argument("--out", type=Path, required=name != "eval", help=about)
        action.set_defaults(run=_command(body, on_every_rank))


def _command(body: Body, on_every_rank: OnEveryRank) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from megatron_tlt.config.load import load_config
        from megatron_tlt.config.root import Config

        config = load_config(args.config, args.overrides, Config)
        return on_every_rank(
            config.distributed, config.rollout.threads, lambda world: body(config, world, args)
        )

    return run


def _init(config: Config, world: World, args: argparse.Namespace) -> None:
    from megatron_tlt.drafter.checkpoint import save_drafter
    from megatron_tlt.models.base import DTYPES
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.eagle import EagleModel

    shape = ModelConfig.from_hf(config.model.path)
    if world.is_main:
        model = EagleModel(shape)
        model.initialise(config.drafter.seed)
        save_drafter(args.out, shape, model.state_dict(), dtype=DTYPES[config.drafter.save_dtype])
        print(f"wrote {args.out} (untrained)", flush=True)


def _train(config: Config, world: World, args: argparse.Namespace) -> None:
    from megatron_tlt.build import open_tokenizer
    from megatron_tlt.data.prompts import build_prompts

    warm_up = _warm_up(config, world)
    _start_from(warm_up, args.drafter, config.drafter.seed)
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
    warm_up = _warm_up(config, world)
    _start_from(warm_up, args.drafter, config.drafter.seed)
    result = warm_up.measure(warm_up.held_out(prompts))
    if world.is_main:
        print(result.table(), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def _warm_up(config: Config, world: World) -> DrafterWarmUp:
    """The engine with the model's weights, without speculation: it is what the drafter learns from."""
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.build import open_backend, open_tokenizer, sampling_params
    from megatron_tlt.config.speculation import SpeculationSection
    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.loader import iter_weights
    from megatron_tlt.preflight import check_on
    from megatron_tlt.sync.push import BucketedSync
    from megatron_tlt.warmup import DrafterWarmUp

    plain = config.rollout.model_copy(update={"speculation": SpeculationSection()})
    config = config.model_copy(update={"rollout": plain})
    if config.rollout.backend != "embedded":
        allowed = "must be 'embedded' here: a drafter learns from the policy's hidden states"
        raise ConfigError.of("rollout.backend", config.rollout.backend, allowed)
    check_on(config, world)
    backend = open_backend(config, world, open_tokenizer(config))
    world.enter("load")
    path = config.model.path
    assert isinstance(backend, EmbeddedBackend), "checked above"
    BucketedSync(config.sync, backend, world).push(iter_weights(path, ModelConfig.from_hf(path)), version=0)
    return DrafterWarmUp(config, world, backend, sampling_params(config))


def _start_from(warm_up: DrafterWarmUp, drafter: Path | None, seed: int) -> None:
    from megatron_tlt.drafter.checkpoint import load_drafter

    if drafter is None:
        warm_up.model.initialise(seed)
        return
    saved = load_drafter(drafter, warm_up.model_config)
    warm_up.model.load_full(saved.weights.items())
    warm_up.trained_steps = saved.trained_steps


def _held_out(config: Config, required: bool) -> list[Any]:
    from megatron_tlt.build import open_tokenizer
    from megatron_tlt.data.prompts import build_prompts

    if config.data.eval is None:
        if required:
            raise ConfigError.of("data.eval", None, "measuring a drafter needs held-out prompts")
        return []
    stream = build_prompts(config.data, "eval", open_tokenizer(config), config.train.seed)
    return stream.next_batch(config.drafter.eval_prompts)

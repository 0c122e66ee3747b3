"""`megatron-tlt export`: a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank, sigterm_as_ctrl_c
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World


def add_export(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "write a run's checkpoint as a Hugging Face directory"
    command = commands.add_parser("export", help=text, description=text)
    add_config(command)
    command.add_argument("--out", type=Path, required=True, help="directory to write")
    command.add_argument("--overwrite", action="store_true", help="replace an older export in --out")
    command.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with actor.lora: the adapters alone, a PEFT directory",
    )
    command.add_argument("--dtype", choices=("fp32", "bf16"), help="default: actor.dtype")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.hub import on_this_machine

    sigterm_as_ctrl_c()
    config = read_config(args, Config)
    host = config.distributed.model_copy(update={"device": "cpu"})  # nothing is built, on no device
    return run_on_every_rank(
        host, None, lambda world: _export_on(on_this_machine(config, world, weights=False), world, args)
    )


def _export_on(config: Config, world: World, args: argparse.Namespace) -> None:
    """Writes the checkpoint that `checkpoint.resume` names (default: the run's latest) as a Hugging Face directory.

    It appears complete or not at all. Collective. Raises CheckpointError, ConfigError (also where it exists and is not
    to be replaced).
    """
    from megatron_tlt.checkpoint.export import write_adapter, write_run
    from megatron_tlt.checkpoint.resume import find_checkpoint
    from megatron_tlt.trainer.run_record import other_model

    # One rank looks; all write their share, below a directory that all must see.
    wanted = args.out, args.overwrite, args.adapter
    problems = world.broadcast_object(problems_of(config, *wanted) if world.is_main else [])
    lora = config.actor.lora
    if args.adapter and lora is None:
        problems.append(ConfigProblem("--adapter", True, "needs a run with actor.lora"))
    if problems:
        raise ConfigError(problems)
    world.enter("load")
    checkpoints = Path(config.train.run_dir) / "checkpoints"
    found = find_checkpoint(world, checkpoints, config.checkpoint.resume)
    if found is None:
        raise CheckpointError(f"no checkpoint of the run in {checkpoints} yet: checkpoint.resume=PATH names another")
    for warning in other_model(config, found.parent.parent) if world.is_main else []:
        _log.warning(warning)
    world.enter("export")
    dtype = args.dtype or config.actor.dtype
    if args.adapter and lora is not None:
        said = write_adapter(found, world, config.model, args.out, dtype, lora, args.overwrite)
    else:
        said = write_run(found, world, config.model, args.out, dtype, args.overwrite, lora)
    if world.is_main:
        print(f"wrote {args.out} ({said})", flush=True)


def problems_of(config: Config, out: Path, overwrite: bool = False, adapter: bool = False) -> list[ConfigProblem]:
    """Problems with exporting a configuration's run as `out`. Engines, prompts and layout do not matter."""
    from megatron_tlt.checkpoint.export import export_problems
    from megatron_tlt.trainer.preflight import read_model, tokenizer_problems

    _, problems = read_model("model.path", config.model.path)
    return [*problems, *tokenizer_problems(config), *export_problems(out, config, overwrite, adapter)]

"""`megatron-tlt export`: a run's checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.errors import CheckpointError, ConfigError

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
    command.add_argument("--dtype", choices=("fp32", "bf16"), help="default: actor.dtype")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config

    config = read_config(args, Config)
    return run_on_every_rank(
        config.distributed, None, lambda world: _export_on(config, world, args.out, args.dtype)
    )


def _export_on(config: Config, world: World, out: Path, dtype: str | None) -> None:
    """Writes the checkpoint that `checkpoint.resume` names (default: the run's latest) as a Hugging Face directory.

    `out` appears complete or not at all. Collective. Raises CheckpointError, ConfigError (also where `out` exists).
    """
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.checkpoint.export import export_problems, write_run
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.trainer.sft import CompletionLoss

    config = checked(config, world)
    run_dir = Path(config.train.run_dir)
    found = export_problems(out, run_dir, str(config.checkpoint.resume)) if world.is_main else []
    if problems := world.broadcast_object(found):  # only rank 0 writes, perhaps where others see no files
        raise ConfigError(problems)
    policy = MegatronPolicy(
        world, config.model, config.actor, config.optimizer, CompletionLoss(), config.train.num_steps
    )
    manager = CheckpointManager(config.checkpoint, run_dir, config.train.num_steps, policy, world)
    world.enter("load")
    if manager.load_latest() is None:
        raise CheckpointError(f"no checkpoint in {run_dir / 'checkpoints'}")
    world.enter("export")
    drafter = manager.load_drafter()
    write_run(policy, world, config.model, out, dtype or config.actor.dtype, drafter)
    if world.is_main:
        trained = "" if drafter is None else f", drafter in {out / 'drafter'}"
        print(f"wrote {out} (policy version {policy.policy_version}{trained})", flush=True)


def checked(config: Config, world: World) -> Config:
    """The configuration as this world exports it. Collective. Raises ConfigError with every problem.

    The memory plan is of a run's engines and phases, so it is not asked.
    """
    from megatron_tlt.trainer.preflight import check_on

    config = _for_export(config, world.size)
    check_on(config, world, is_run=False)
    return config


def _for_export(config: Config, num_ranks: int) -> Config:
    """An export does not draft: a drafter that the configuration names need not be there, or fit. One rank has one
    layout only, and takes the checkpoint of any.
    """
    alone = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "sequence_parallel": False} if num_ranks == 1 else {}
    speculation = config.rollout.speculation.model_copy(update={"drafter": "none"})
    engine = {"speculation": speculation} | ({"tp": 1} if alone else {})
    sections = {
        "actor": config.actor.model_copy(update=alone),
        "rollout": config.rollout.model_copy(update=engine),
        "idle": config.idle.model_copy(update={"train_drafter": False}),
    }
    return config.model_copy(update=sections)

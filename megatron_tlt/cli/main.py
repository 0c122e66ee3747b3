"""The command line: train, sft, eval, generate, export, check, drafter, simulate, and what looks at runs.

The only place with a broad `except`: whatever goes wrong on one rank is reported with rank, phase and step, and
the whole MPI job ends with a non-zero code.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.doctor.command import add_doctor
from megatron_tlt.cli.drafter import add_drafter
from megatron_tlt.cli.report import add_report
from megatron_tlt.cli.simulate import add_simulate
from megatron_tlt.cli.status import add_status
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.distributed.signals import StopSignals
from megatron_tlt.errors import ConfigError, ConfigProblem, TltError
from megatron_tlt.observe.attempt import note_exit

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World

EXIT_DONE, EXIT_FAILURE, EXIT_CONFIG, EXIT_SAVED = 0, 1, 2, 75  # 75: saved, please start me again

# Said by megatron at import, once a rank, about things that are as they should be on this machine.
_VENDOR_NOISE = (
    "Transformer Engine and Apex",
    "Apex is not installed",
    "full scope is deprecated",
    ".*load_state_dict.* is deprecated",
    "Please use DTensor instead",
    ".*CUDA_DEVICE_MAX_CONNECTIONS",
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 (failed) or 2 (the configuration or arguments are wrong).

    A run that a signal ended, saved, does not return: its ranks leave with 75.
    """
    args = _parse(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        # Every rank finds the same problems; one copy is enough.
        if detect_launch().rank in (0, None):
            _print_problems(error)
            note_exit(EXIT_CONFIG)
        return EXIT_CONFIG
    except TltError as error:
        print(f"megatron-tlt: {type(error).__name__}: {error}", file=sys.stderr)
        note_exit(EXIT_FAILURE)
        return EXIT_FAILURE
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not fail at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILURE
    except OSError as error:
        print(f"megatron-tlt: {type(error).__name__}: {error}", file=sys.stderr)
        note_exit(EXIT_FAILURE)
        return EXIT_FAILURE


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may also stand behind options, where argparse alone takes none."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in args or any(a.startswith("-") or "=" not in a for a in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-tlt", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, text in (
        ("train", _train, "train a policy by reinforcement learning"),
        ("sft", _sft, "fine-tune on prompts and completions"),
        ("eval", _eval, "evaluate a model on a config's held-out prompts"),
        ("export", _export, "write a run's checkpoint as a Hugging Face directory"),
        ("check", _check, "say whether a config can run, where each rank sits and what it needs"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", type=Path, help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")
        command.set_defaults(run=run)
        if name == "check":
            command.add_argument(
                "--ranks", type=int, help="number of ranks (default: cluster.nodes * ranks_per_node)"
            )
            command.add_argument("--sft", action="store_true", help="a config of `sft`, not of `train`")
        if name == "eval":
            command.add_argument("--out", type=Path, help="also write the result as JSON")
        if name == "export":
            command.add_argument("--out", type=Path, required=True, help="directory to write")
            command.add_argument("--dtype", choices=("fp32", "bf16"), help="default: actor.dtype")
    _add_generate(commands)
    add_drafter(commands, _on_every_rank)
    add_status(commands)
    add_doctor(commands)
    add_report(commands)
    add_simulate(commands)
    return parser


def _add_generate(commands: Any) -> None:
    text = "answer the prompts of a JSONL file"
    command = commands.add_parser("generate", help=text, description=text)
    command.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    command.add_argument("--prompts", type=Path, required=True, help='JSONL of {"prompt"} or {"token_ids"}')
    command.add_argument("--out", type=Path, required=True, help="JSONL to write")
    command.add_argument("--n", type=int, default=1, help="answers to each prompt")
    command.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--max-tokens", type=int, default=512)
    command.add_argument(
        "--stop", action="append", default=[], help="string that ends an answer (repeatable)"
    )
    command.add_argument("--ignore-eos", action="store_true")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    command.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    command.add_argument("--logprobs", action="store_true", help="write the log-probability of every token")
    command.add_argument("--stats", type=Path, help="JSON of counters and speeds to write")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="rollout.a.b=v",
        help="engine settings, e.g. rollout.speculation.drafter=suffix rollout.numerics=invariant",
    )
    command.set_defaults(run=_generate)


def _train(args: argparse.Namespace) -> int:
    signals = StopSignals().install()  # first: importing the rest takes seconds
    from megatron_tlt.config.load import load_config
    from megatron_tlt.config.root import Config

    config = load_config(args.config, args.overrides, Config)  # mistakes are told before those seconds
    from megatron_tlt.trainer.setup import build_trainer

    def body(world: World) -> int:
        trainer = build_trainer(config, world, signals)
        stopped = trainer.run()
        trainer.close()
        return EXIT_SAVED if stopped else EXIT_DONE

    return _on_every_rank(config.distributed, config.rollout.threads, body)


def _sft(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_config
    from megatron_tlt.config.root import SftConfig

    config = load_config(args.config, args.overrides, SftConfig)
    from megatron_tlt.trainer.setup import build_sft_trainer

    return _on_every_rank(config.distributed, None, lambda world: build_sft_trainer(config, world).run())


def _eval(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_config
    from megatron_tlt.config.root import Config

    config = load_config(args.config, args.overrides, Config)
    from megatron_tlt.trainer.setup import run_evaluation

    return _on_every_rank(
        config.distributed, config.rollout.threads, lambda w: run_evaluation(config, w, args.out)
    )


def _export(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_config
    from megatron_tlt.config.root import Config

    config = load_config(args.config, args.overrides, Config)
    from megatron_tlt.trainer.setup import run_export

    return _on_every_rank(
        config.distributed, None, lambda world: run_export(config, world, args.out, args.dtype)
    )


def _check(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_config
    from megatron_tlt.config.root import Config, SftConfig
    from megatron_tlt.trainer.preflight import check_report

    if args.ranks is not None and args.ranks < 1:
        raise ConfigError.of("--ranks", args.ranks, "must be >= 1")
    config: Config | SftConfig
    if args.sft:
        config = load_config(args.config, args.overrides, SftConfig)
    else:
        config = load_config(args.config, args.overrides, Config)
    print(check_report(config, args.ranks))
    return 0


def _generate(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_engine
    from megatron_tlt.config.run import DistributedSection

    problems = _generate_problems(args)
    options = [f"rollout.{name}={getattr(args, name)}" for name in ("dtype", "kernels", "threads")]
    try:
        engine = load_engine([*options, *args.overrides])
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    from megatron_tlt.trainer.setup import run_generate

    return _on_every_rank(
        DistributedSection(), engine.threads, lambda world: run_generate(args, engine, world)
    )


def _generate_problems(args: argparse.Namespace) -> list[ConfigProblem]:
    """Numbers that argparse cannot refuse. Files are looked for on the ranks."""
    from megatron_tlt.types import SamplingParams

    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
    wrong = [(name, value, ">= 1") for name in ("n", "max_tokens") if (value := getattr(args, name)) < 1]
    return [
        ConfigProblem(f"--{name.replace('_', '-')}", value, f"must be {allowed}")
        for name, value, allowed in (*wrong, *sampling.out_of_range())
    ]


def _on_every_rank(section: Any, threads: int | None, body: Callable[[World], int | None]) -> int:
    """Runs `body(world)` on this rank of the job; any error ends every rank. Returns its exit status, None is 0."""
    from megatron_tlt.distributed.world import World

    for text in _VENDOR_NOISE:
        warnings.filterwarnings("ignore", message=text)
    world = World.start(section, threads)
    try:
        code = body(world) or EXIT_DONE
        world.enter("exit")
        if world.is_main:
            note_exit(code)
        if code:
            world.leave(code)
        world.close()
    except ConfigError as error:
        # Usually every rank finds the same problems, but one may be alone: the first to come speaks, then leaves.
        if world.store.add("config_error", 1) == 1:
            _print_problems(error)
            note_exit(EXIT_CONFIG)
        return EXIT_CONFIG
    except BaseException as error:  # noqa: BLE001  one rank's error must end all ranks, whatever it is
        text = _failure(world, error)
        print(text, file=sys.stderr, flush=True)
        note_exit(EXIT_FAILURE)
        world.abort(EXIT_FAILURE, text.splitlines()[0], _is_timeout(error))
    return 0


def _print_problems(error: ConfigError) -> None:
    lines = [f"megatron-tlt: {len(error.problems)} problem(s) in the configuration:"]
    print("\n".join([*lines, *(f"  {problem}" for problem in error.problems)]), file=sys.stderr, flush=True)


def _is_timeout(error: BaseException) -> bool:
    """Whether somebody was waited for in vain: in a collective, or in an idle window."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text or "nothing was heard" in text


def _failure(world: World, error: BaseException) -> str:
    """What a person needs to know first: who, where, what; then, for our own mistakes, the traceback."""
    where = f"rank {world.rank} failed in phase {world.phase_name}"
    if world.step >= 0:
        where += f", step {world.step}"
    lines = [f"megatron-tlt: {where}: {type(error).__name__}: {error}"]
    if _is_timeout(error):
        lines.append(
            f"  waited {world.timeout_s:g} s (distributed.timeout_s); not arrived: {world.missing_ranks()}"
        )
    if not isinstance(error, TltError | KeyboardInterrupt):
        lines.append("".join(traceback.format_exception(error)))
    return "\n".join(lines)

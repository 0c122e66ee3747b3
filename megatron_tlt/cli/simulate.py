"""`megatron-tlt simulate`: seconds of a run's steps on a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.checks.files import output_file_problems, same_file_problems
from megatron_tlt.errors import ConfigError
from megatron_tlt.sim.result import MODES

if TYPE_CHECKING:
    from megatron_tlt.config.sim import SimConfig

SIMULATION = rb'\{\n "schema": "megatron-tlt/simulation/'  # how the result begins
_USUAL = ["off", "suffix", "tlt"]


def add_simulate(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "simulate RL steps on a cluster: step time, speed-up, idle GPU-hours"
    parser = commands.add_parser("simulate", help=text, description=text)
    parser.add_argument("config", type=Path, help="YAML file, as configs/sim/paper-7b.yaml, or a run's")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=v", help="values that replace the file's")
    parser.add_argument(
        "--compare",
        metavar="MODES",
        help=f"some of {', '.join(MODES)}; the first is the baseline (default: {','.join(_USUAL)}; "
        "of a run those of them that its engine has, frozen for tlt where it does not train, and tlt+pre where it does "
        "and pre-rolls)",
    )
    parser.add_argument("--sweep", metavar="nodes=1,2,4", help="numbers of nodes (default: cluster.nodes)")
    parser.add_argument("--out", type=Path, help="also write the result as JSON")
    parser.add_argument("--report", type=Path, help="also write an HTML page with charts")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from megatron_tlt.observe.page import page_begins
    from megatron_tlt.sim.modes import simulate
    from megatron_tlt.sim.report import write_report
    from megatron_tlt.sim.tables import simulation_text

    if written := [
        *output_file_problems("--out", args.out, SIMULATION, [args.config]),
        *output_file_problems("--report", args.report, page_begins(), [args.config]),
        *same_file_problems("--report", args.report, "--out", args.out),
    ]:
        raise ConfigError(written)
    modes = [] if args.compare is None else parse_modes(args.compare)
    result = simulate(*_load(args.config, args.overrides, modes, parse_sweep(args.sweep)))
    print(simulation_text(result))
    if args.out is not None:
        result.write(args.out)
        print(f"\nwrote {args.out}")
    if args.report is not None:
        write_report(result, args.report)
        print(f"\nwrote {args.report}")
    return 0


def _load(
    path: Path, overrides: list[str], modes: list[str], nodes: list[int]
) -> tuple[list[SimConfig], list[str], list[str]]:
    """The simulation on each number of `nodes`, its `modes` (none: the usual ones), and what was assumed to make it of
    a run's configuration.
    """
    from megatron_tlt.cli.options import load_config
    from megatron_tlt.config.checks.sim import check_sim
    from megatron_tlt.config.root import Config
    from megatron_tlt.config.sim import SimConfig
    from megatron_tlt.config.yaml_reader import read_config_file
    from megatron_tlt.sim.modes import on_nodes

    if {"train", "data"} & read_config_file(path).keys():  # a run's configuration: its machines, engine, usual lengths
        from megatron_tlt.models.hf.config import shape_of
        from megatron_tlt.sim.from_run import simulation_of, usual_modes
        from megatron_tlt.trainer.teacher import with_teacher_shape

        run = load_config(path, overrides, Config)
        model = run.model.model_copy(update={"architecture": shape_of(run.model)})
        runs = on_nodes(with_teacher_shape(run.model_copy(update={"model": model})), nodes)
        modes = modes or usual_modes(runs, _USUAL)
        made = [simulation_of(each, modes) for each in runs]  # the memory plan is another on each
        return [simulation for simulation, _ in made], modes, made[0][1]
    config = load_config(path, overrides, SimConfig)
    if problems := list(check_sim(config)):
        raise ConfigError(problems)
    return on_nodes(config, nodes), modes or _USUAL, []


def parse_modes(text: str) -> list[str]:
    """`a,b,c`. Raises ConfigError for one that stands twice."""
    modes = [part.strip() for part in text.split(",") if part.strip()]
    if not modes or len(set(modes)) < len(modes):
        raise ConfigError.of("--compare", text, "must be modes with commas between them, none twice")
    return modes


def parse_sweep(text: str | None) -> list[int]:
    """`nodes=1,2,4` as numbers, ascending, each once; nothing for None. Raises ConfigError."""
    if text is None:
        return []
    name, _, values = text.partition("=")
    parts = values.split(",")
    if name != "nodes" or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError.of("--sweep", text, "must look like nodes=1,2,4")
    return sorted({int(part) for part in parts})

"""What the conversion scripts in tools/ share: start of ranks, exit codes, and the texts that they print."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from inspection import Difference, Opened, weights_digest

from megatron_tlt.actor.checkpoint_files import record_of
from megatron_tlt.checkpoint.atomic import gib, problem_of
from megatron_tlt.checkpoint.convert.hf_dir import dtype_name
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED
from megatron_tlt.cli.ranks import report_interrupt, run_on_every_rank, sigterm_as_ctrl_c
from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.distributed.together import Ranks, SingleProcess, together
from megatron_tlt.errors import ConfigError, TltError, printable, shortened
from megatron_tlt.models.hf.config import ModelConfig

Todo = TypeVar("Todo")


def run(name: str, plan: Callable[[Ranks], Todo], act: Callable[[Todo, Ranks], int]) -> int:
    """Runs `plan`, then `act` with what it returned, on this rank; exit status 0, 1 (failed) or 2 (bad input).

    An error of `plan`, on any rank, is bad input; one of `act` is so only if it is a ConfigError. MPI is started only
    where a launcher started several ranks. SIGTERM, with 143, ends like Ctrl-C, with 130: unfinished output is removed.
    """
    sigterm_as_ctrl_c()
    launch = detect_launch()
    try:
        if launch.size in (1, None):
            return _guarded(name, plan, act, SingleProcess())
        host = DistributedSection(device="cpu")
        return run_on_every_rank(host, None, lambda world: _guarded(name, plan, act, world))
    except KeyboardInterrupt as error:
        return report_interrupt(launch.rank in (0, None), error)[0]


def _guarded(name: str, plan: Callable[[Ranks], Todo], act: Callable[[Todo, Ranks], int], ranks: Ranks) -> int:
    status = BAD_INPUT
    try:
        with together(ranks):
            todo = plan(ranks)
        status = FAILED
        return act(todo, ranks)
    except TltError as error:
        if ranks.is_main:  # every rank has the same error, or one that names the failed rank
            print(printable(f"{name}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError) else status


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds what both converters take."""
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an older conversion in --out")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: as stored")
    parser.add_argument("--dry-run", action="store_true", help="check, print model and sizes, write nothing")


def check_output(args: argparse.Namespace, command: str, sources: Iterable[Path], ranks: Ranks) -> None:
    """Raises ConfigError if `--out` cannot be made from `sources`. Rank 0 looks: others may not see its files."""
    if ranks.is_main and (problem := problem_of(args.out, command, args.overwrite, sources)):
        raise ConfigError.of("--out", str(args.out), problem)


def print_warnings(texts: Iterable[str]) -> None:
    """Prints what is left out of the input, or cannot be compared."""
    for text in texts:
        print(printable(f"warning: {text}"))


def report(
    todo: MegatronConversion | HfConversion, source: Path, out: Path, config: ModelConfig, more: Iterable[str]
) -> str:
    """What a conversion of the model of shape `config` in `source` will write as `out`; `more`: lines of its own."""
    tied = ", tied embeddings" if config.tie_word_embeddings else ""
    model = f"{config.family}, {config.num_layers} layers, {config.num_parameters:,} parameters{tied}"
    title = f"{source} -> {out}: {model}, {dtype_name(todo.dtype)}"
    parent = out.parent
    free = f", {gib(shutil.disk_usage(parent).free)} free in {parent.resolve()}" if parent.is_dir() else ""
    return "\n".join([title, *more, f"total {gib(todo.num_bytes)}{free}"])


def description(opened: Opened) -> str:
    """Kind, model, type, layout, versions and sizes of a checkpoint. Reads no tensor."""
    config = opened.config
    sizes = [path.stat().st_size for path in opened.directory.iterdir() if path.is_file()]
    lines = [
        ("model", f"{config.family}, {config.num_layers} layers, hidden {config.hidden_size}"),
        ("", f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.head_dim}"),
        ("", f"vocabulary {config.vocab_size}{', tied embeddings' if config.tie_word_embeddings else ''}"),
        ("parameters", f"{config.num_parameters:,} in {len(config.parameter_shapes())} tensors"),
        ("type", ", ".join(opened.dtypes)),
        *opened.facts.items(),
        ("on disk", f"{gib(sum(sizes))} in {len(sizes)} files"),
    ]
    return "\n".join([f"{opened.kind}: {opened.directory}", *(f"{name:<20}{text}" for name, text in lines)])


def checksum_report(opened: Opened) -> str:
    """The digest of the weights, if there are any, and size and checksum of every file. Reads all of them."""
    lines = [f"{'weights':<20}sha256 {weights_digest(opened)}"] if opened.has_weights else []
    for path in sorted(path for path in opened.directory.iterdir() if path.is_file()):
        record = record_of(path)
        lines.append(f"{'file':<20}{path.name}  {gib(record.size)}  sha256 {record.sha256[:16]}")
    return "\n".join(lines)


def comparison_report(b: Opened, difference: Difference) -> str:
    """How a checkpoint differs from `b`, the largest difference first."""
    retyped = f"{difference.retyped} the same numbers in another type"
    largest = sorted(difference.differing, key=lambda pair: -pair[1])
    lines = [
        f"compared with {b.directory} ({b.kind}): {difference.total} tensors",
        f"    {difference.identical} identical bit for bit, {retyped}, {len(largest)} different",
    ]
    if largest:
        texts = [f"{name}: largest difference {value:.3g}" for name, value in largest]
        lines.append("    " + shortened(texts, 10, separator="\n    "))
    return "\n".join(lines)

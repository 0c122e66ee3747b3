"""What the conversion scripts in tools/ share: start of ranks, exit codes, and the texts that they print."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from inspection import Difference, Opened, is_saved_again, weights_digest

from megatron_tlt.actor.checkpoint_files import record_of
from megatron_tlt.actor.hf_names import slots
from megatron_tlt.checkpoint.atomic import gib, problem_of
from megatron_tlt.checkpoint.convert.hf_dir import dtype_name
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.distributed.together import Ranks, SingleProcess, together
from megatron_tlt.errors import ConfigError, TltError, printable, shortened
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import stored_names

Todo = TypeVar("Todo")
_LAYER = re.compile(r"\.layers\.\d+\.")


def run(name: str, plan: Callable[[Ranks], Todo], act: Callable[[Todo, Ranks], int]) -> int:
    """Runs `plan`, then `act` with what it returned, on this rank; exit status 0, 1 (failed) or 2 (bad input).

    An error of `plan`, on any rank, is bad input; one of `act` is so only if it is a ConfigError. MPI
    is started only where a launcher started several ranks. SIGTERM ends like Ctrl-C: unfinished output is removed.
    """
    signal.signal(signal.SIGTERM, _leave)
    if detect_launch().size in (1, None):
        return _guarded(name, plan, act, SingleProcess())
    from megatron_tlt.config.run import DistributedSection
    from megatron_tlt.distributed.world import World

    world = World.start(DistributedSection(device="cpu"))
    try:
        status = _guarded(name, plan, act, world)
    except BaseException:  # the other ranks would wait forever for one that died
        traceback.print_exc()
        world.abort(FAILED)
        raise
    world.close()
    return status


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
    parser.add_argument("--dry-run", action="store_true", help="check, print the mapping and sizes, write nothing")


def check_output(args: argparse.Namespace, command: str, sources: Iterable[Path], ranks: Ranks) -> None:
    """Raises ConfigError if `--out` cannot be made from `sources`. Rank 0 looks: others may not see its files."""
    if ranks.is_main and (problem := problem_of(args.out, command, args.overwrite, sources)):
        raise ConfigError.of("--out", str(args.out), problem)


def print_warnings(texts: Iterable[str]) -> None:
    """Prints what is left out of the input, or cannot be compared."""
    for text in texts:
        print(printable(f"warning: {text}"))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def megatron_report(todo: MegatronConversion, out: Path) -> str:
    """The mapping from Hugging Face names to Megatron tensors."""
    config = todo.source.config
    shapes = config.parameter_shapes()
    counts: dict[tuple[str, str], int] = {}
    for slot in slots(config, 1):
        names = ", ".join(f"{_any_layer(name)} {list(shapes[name])}" for name in slot.hf_names)
        mapping = (names, _any_layer(todo.stored(slot).key))
        counts[mapping] = counts.get(mapping, 0) + 1
    lines = [_title(todo.source.directory, out, config, todo.dtype), ""]
    lines += [f"{names}\n    -> {key} x {count}" for (names, key), count in counts.items()]
    if todo.source.ignored:
        lines.append(f"not converted, they carry nothing: {', '.join(todo.source.ignored)}")
    return "\n".join([*lines, "", _total(todo.num_bytes, out)])


def hf_report(todo: HfConversion, out: Path) -> str:
    """The mapping from Megatron tensors to Hugging Face names, and what each file will hold."""
    source, shapes = todo.source, todo.config.parameter_shapes()
    counts: dict[tuple[str, ...], int] = {}
    for slot in slots(todo.config, 1):
        stored = source.find(slot)
        assert stored is not None, "the conversion was checked"
        names = [f"    -> {_any_layer(name)} {list(shapes[name])}" for name in slot.hf_names]
        mapping = (f"{_any_layer(stored.key)} {list(source.tensors[stored.key].size)}", *names)
        counts[mapping] = counts.get(mapping, 0) + 1
    lines = [_title(source.directory, out, todo.config, todo.dtype), ""]
    for (stored_as, *names), count in counts.items():
        lines += [stored_as, *(f"{name} x {count}" for name in names)]
    lines.append("")
    for number, names in enumerate(todo.names):
        size = sum(prod(shapes[name]) for name in names) * todo.dtype.itemsize
        lines.append(f"{todo.name(number)}  {len(stored_names(todo.config, names))} tensors, {gib(size)}")
    return "\n".join([*lines, _total(todo.num_bytes, out)])


def _any_layer(name: str) -> str:
    return _LAYER.sub(".layers.*.", name)


def _title(source: Path, out: Path, config: ModelConfig, dtype: torch.dtype) -> str:
    tied = ", tied embeddings" if config.tie_word_embeddings else ""
    model = f"{config.family}, {config.num_layers} layers, {config.num_parameters:,} parameters{tied}"
    return f"{source} -> {out}: {model}, {dtype_name(dtype)}"


def _total(num_bytes: int, out: Path) -> str:
    parent = out.parent
    free = f", {gib(shutil.disk_usage(parent).free)} free in {parent.resolve()}" if parent.is_dir() else ""
    return f"total {gib(num_bytes)}{free}"


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


def comparison_report(a: Opened, b: Opened, difference: Difference) -> str:
    """How two checkpoints differ, the largest difference first."""
    retyped = f"{difference.retyped} the same numbers in another type"
    largest = sorted(difference.differing, key=lambda pair: -pair[1])
    lines = [
        f"compared with {b.directory} ({b.kind}): {difference.total} tensors",
        f"    {difference.identical} identical bit for bit, {retyped}, {len(largest)} different",
    ]
    if largest:
        texts = [f"{name}: largest difference {value:.3g}" for name, value in largest]
        lines.append("    " + shortened(texts, 10, separator="\n    "))
    if is_saved_again(a, b, difference):
        lines.append(f"WARNING: steps {a.step} and {b.step} hold the same weights: the same weights were saved again")
    return "\n".join(lines)

"""Convert a Megatron distributed checkpoint (Megatron-LM's or a converted one, any layout) to a Hugging Face directory.

python tools/convert_megatron_to_hf.py --megatron my-megatron --out my-model
python tools/convert_megatron_to_hf.py --megatron megatron-lm/checkpoints --config assets/demo-policy --out my-model
mpiexec -n 4 python -m mpi4py tools/convert_megatron_to_hf.py ...         # the same, the files shared out over 4 ranks
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import conversion as command

from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.atomic import check_room, gib
from megatron_tlt.checkpoint.convert.to_hf import COMMAND, HfConversion
from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.data.hub import fetch_argument
from megatron_tlt.distributed.together import Ranks
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.files import config_warnings
from megatron_tlt.models.hf.writer import stored_names


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 (failed, nothing written) or 2 (bad input: arguments, model, files)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megatron",
        type=Path,
        required=True,
        help="with latest_checkpointed_iteration.txt, or with the shards",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="Hugging Face directory, or OWNER/NAME on the hub; default: config.json beside the shards",
    )
    parser.add_argument("--max-file-gib", type=float, default=4.0, help="split safetensors above this size")
    command.add_output(parser)
    args = parser.parse_args(argv)
    if not 0 < args.max_file_gib < math.inf:
        parser.error(f"argument --max-file-gib: must be above 0 and finite, not {args.max_file_gib:g}")

    def plan(ranks: Ranks) -> HfConversion:
        if args.config is not None:
            args.config = fetch_argument("--config", args.config, ranks, "companions")
        command.check_output(args, COMMAND, [args.megatron], ranks)  # before the checksums
        _refuse_a_run(args.megatron)
        limit = int(args.max_file_gib * 2**30)
        share = {"part": ranks.rank, "parts": ranks.size}  # of the checksums
        todo = HfConversion.plan(args.megatron, args.dtype, args.config, limit, **share)
        command.check_output(args, COMMAND, todo.sources, ranks)
        return todo

    def convert(todo: HfConversion, ranks: Ranks) -> int:
        if ranks.is_main:
            command.print_warnings([*todo.source.warnings(), *config_warnings(todo.config_file)])
            if text := todo.source.padding(todo.config):
                print(text)
        if args.dry_run:
            if ranks.is_main:
                print(command.report(todo, todo.source.directory, args.out, todo.config, _files(todo)))
                check_room(args.out, todo.num_bytes)
            return OK
        todo.write(args.out, ranks, args.overwrite)
        if ranks.is_main:
            print(f"wrote {args.out}: {len(todo.config.parameter_shapes())} tensors, {gib(todo.num_bytes)}")
        return OK

    return command.run(parser.prog, plan, convert)


def _files(todo: HfConversion) -> Iterator[str]:
    """A line for each file of weights."""
    shapes = todo.config.parameter_shapes()
    for number, names in enumerate(todo.names):
        size = sum(prod(shapes[name]) for name in names) * todo.dtype.itemsize
        yield f"{todo.name(number)}  {len(stored_names(todo.config, names))} tensors, {gib(size)}"


def _refuse_a_run(megatron: Path) -> None:
    """Raises ConfigError for the checkpoint of a run, of which `export` writes the drafter and the tokenizer, too."""
    manifest = TorchDistReader(megatron).manifest()
    if manifest is not None and not manifest.is_converted:
        allowed = "is a checkpoint of a run, which `megatron-tlt export CONFIG --out DIR` writes, with its drafter"
        raise ConfigError.of("--megatron", str(megatron), allowed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Convert a Hugging Face directory to a Megatron distributed checkpoint, on CPU, a chunk at a time.

    python tools/convert_hf_to_megatron.py --hf assets/demo-policy --out my-megatron
    mpiexec -n 4 python -m mpi4py tools/convert_hf_to_megatron.py ...   # the same, shared out over 4 ranks

A run starts from it with model.path=my-megatron model.megatron_path=my-megatron; Megatron-LM with --load my-megatron
--use-checkpoint-args and the flags that this does not set, which are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import conversion as command

from megatron_tlt.actor.megatron_arguments import flags_to_give, without_a_flag
from megatron_tlt.checkpoint.atomic import check_room, gib
from megatron_tlt.checkpoint.convert.to_megatron import COMMAND, MegatronConversion
from megatron_tlt.cli.exit_codes import OK
from megatron_tlt.data.hub import fetch_argument
from megatron_tlt.distributed.together import Ranks
from megatron_tlt.models.hf.files import model_warnings


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 (failed, nothing written) or 2 (bad input: arguments, model, files)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face directory, or OWNER/NAME on the hub")
    command.add_output(parser)
    args = parser.parse_args(argv)

    def plan(ranks: Ranks) -> MegatronConversion:
        args.hf = fetch_argument("--hf", args.hf, ranks)
        command.check_output(args, COMMAND, [args.hf], ranks)
        return MegatronConversion.plan(args.hf, args.dtype)

    def convert(todo: MegatronConversion, ranks: Ranks) -> int:
        if ranks.is_main:
            command.print_warnings([*model_warnings(args.hf), *without_a_flag(todo.source.config)])
        if args.dry_run:
            if ranks.is_main:
                source, ignored = todo.source, todo.source.ignored
                more = [f"not converted, they carry nothing: {', '.join(ignored)}"] if ignored else []
                print(command.report(todo, source.directory, args.out, source.config, more))
                check_room(args.out, todo.num_bytes)
            return OK
        todo.write(args.out, ranks, args.overwrite)
        if ranks.is_main:
            print(f"wrote {args.out}: {gib(todo.num_bytes)}")
            flags = " ".join(flags_to_give(todo.source.config))
            print(f"Megatron-LM: --load {args.out} --use-checkpoint-args takes no {flags}: give these, too")
        return OK

    return command.run(parser.prog, plan, convert)


if __name__ == "__main__":
    raise SystemExit(main())

"""Convert a Hugging Face directory to Megatron and back in a scratch directory, and compare every tensor bit for bit.

python tools/roundtrip.py --hf assets/demo-policy --tp 2 --pp 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import conversion as command

from megatron_tlt.checkpoint.convert import to_megatron
from megatron_tlt.checkpoint.convert.roundtrip import check_work, roundtrip
from megatron_tlt.cli.exit_codes import FAILED, OK
from megatron_tlt.distributed.together import Ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 (every bit came back; with --dtype every number), 1 (not so) or 2 (bad input)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size in between")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size in between")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="type of the copies; default: as stored")
    parser.add_argument(
        "--work", type=Path, help="where to put the scratch directory (default: the system's)"
    )
    args = parser.parse_args(argv)

    def plan(ranks: Ranks) -> to_megatron.Plan:
        check_work(args.work, ranks)
        return to_megatron.plan(args.hf, args.tp, args.pp, args.dtype)

    def compare(todo: to_megatron.Plan, ranks: Ranks) -> int:
        found = roundtrip(todo, args.work, ranks)
        if ranks.is_main:
            same = f"{found.identical} of {found.total} tensors identical bit for bit"
            if found.retyped:
                same += f", {found.retyped} the same numbers in another type"
            print(f"{args.hf}, tp {args.tp} x pp {args.pp}: {same}")
            for name, value in found.differing:
                print(f"    {name}: largest difference {value:.3g}")
        is_exact = not found.differing if args.dtype else found.same_bits
        return OK if is_exact else FAILED

    return command.run(parser.prog, plan, compare)


if __name__ == "__main__":
    raise SystemExit(main())

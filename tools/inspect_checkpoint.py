"""Print the contents of a checkpoint (Hugging Face, Megatron, or a run's), and its differences from another one.

python tools/inspect_checkpoint.py assets/demo-policy
python tools/inspect_checkpoint.py runs/r/checkpoints/step-000020 --compare runs/r/checkpoints/step-000010
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import conversion as command
from inspection import Opened, check_same_model, compare_weights, open_checkpoint

from megatron_tlt.actor.checkpoint_files import damage_of
from megatron_tlt.cli.exit_codes import FAILED, OK
from megatron_tlt.data.hub import fetch_argument
from megatron_tlt.distributed.together import Ranks
from megatron_tlt.errors import printable

_CODES = """exit status:
  0  read to the end; with --compare also where tensors differ (the report lists them)
  1  damaged
  2  wrong arguments, no checkpoint that can be opened, of different models, or of one that is not supported
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 (damaged) or 2 (bad input)."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="checkpoint")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="another checkpoint of the same model")
    parser.add_argument(
        "--config", type=Path, help="Hugging Face directory that describes a checkpoint without config.json"
    )
    parser.add_argument("--quick", action="store_true", help="no checksums: reads no tensor that is not compared")
    args = parser.parse_args(argv)

    def plan(ranks: Ranks) -> tuple[Opened, Opened | None]:
        config = None if args.config is None else fetch_argument("--config", args.config, ranks, "companions")
        opened = open_checkpoint(fetch_argument("directory", args.directory, ranks), config)
        other = None
        if args.compare is not None:
            other = open_checkpoint(fetch_argument("--compare", args.compare, ranks), config)
        if other is not None:  # before all of the first is read
            check_same_model(opened, other)
        return opened, other

    def describe(both: tuple[Opened, Opened | None], ranks: Ranks) -> int:
        if not ranks.is_main:
            return OK
        (opened, other), status = both, OK
        print(printable(command.description(opened)))
        command.print_warnings([*opened.warnings, *(other.warnings if other is not None else [])])
        if not args.quick:
            print(command.checksum_report(opened))
            if opened.manifest is not None and (damage := damage_of(opened.directory)):
                print(printable(f"DAMAGED: {damage}"), file=sys.stderr)
                status = FAILED
        if other is not None:
            difference = compare_weights(opened, other)
            print(printable(command.comparison_report(other, difference)))
        return status

    return command.run(parser.prog, plan, describe)


if __name__ == "__main__":
    raise SystemExit(main())

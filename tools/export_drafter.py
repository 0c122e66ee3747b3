"""Writes a trained drafter in the layout of a serving engine.

    python tools/export_drafter.py --drafter DIR --format hf|sglang|trtllm|vllm --out DIR [--dtype bf16]

`--drafter` is a directory of `megatron-tlt drafter train`. Engines: docs/guides/export_drafter.md. Exit codes:
0 written, 1 the directory cannot be written, 2 bad input: an argument, a file, a drafter that the engine cannot run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED
from megatron_tlt.drafters.base import FORMATS
from megatron_tlt.drafters.export.drafter import export_files, write_export
from megatron_tlt.errors import TltError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a trained drafter in the layout of a serving engine.")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter directory of Megatron-TLT")
    parser.add_argument("--format", required=True, choices=FORMATS, help="engine that will serve it")
    parser.add_argument("--out", type=Path, required=True, help="directory to make; it must not exist")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the weights (default bf16)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    status = BAD_INPUT
    try:
        files = export_files(args.drafter, args.out, args.format, DTYPES[args.dtype])
        status = FAILED
        write_export(files, args.out)
    except TltError as e:
        print(printable(f"export_drafter: {e}"), file=sys.stderr)
        return status
    for name, tensors in files.tensors.items():
        size = sum(t.nbytes for t in tensors.values())
        print(f"{args.out / name}: {len(tensors)} tensors, {size / 1e6:.2f} MB, {args.dtype}")
    for name in (*files.json, "README.md"):
        print(args.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

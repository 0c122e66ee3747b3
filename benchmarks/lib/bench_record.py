"""The JSON record of every benchmark: command, commit, machine, rows and summary."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Of ranks and engines that a benchmark starts: their heap is on pages of 2 MiB, as that of launch/local.sh.
LARGE_PAGES = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}
if os.sysconf("SC_PAGESIZE") != 4096:
    LARGE_PAGES.clear()


def machine() -> str:
    """Processor and cores, for the record."""
    info = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} CPUs"


def commit() -> str:
    """The checked-out commit, or nothing outside a checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_record(out: Path | None, rows: list[dict[str, Any]], summary: dict[str, Any], device: str = "") -> None:
    """Writes the record to `out`, if there is one. `device` goes before the processor's name."""
    if out is None:
        return
    where = f"{device}; {machine()}" if device else machine()
    record = {"command": sys.argv, "commit": commit(), "machine": where, "rows": rows, "summary": summary}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(record_text(record))


def record_text(record: dict[str, Any]) -> str:
    """The JSON of a record: a line for each key and, in a list of rows, for each row."""
    lines = []
    for key, value in record.items():
        is_rows = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if is_rows else json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_record(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and summary that `write_record` of another benchmark wrote."""
    record = json.loads(path.read_text())
    return record["rows"], record["summary"]

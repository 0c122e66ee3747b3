"""What a check found, and the table of all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "failed"]
_SHOWN = {"ok": "ok", "absent": "absent", "warning": "warning", "failed": "FAILED"}


@dataclass(frozen=True)
class Finding:
    """One check's result."""

    name: str
    status: Status
    """ok; absent: not here and not needed for a run on this machine; warning: works, with a catch; failed: required."""
    detail: str
    hint: str = ""
    """How to fix it."""


def passed(findings: Sequence[Finding]) -> bool:
    """Whether everything that is required is there."""
    return not any(f.status == "failed" for f in findings)


def render(findings: Sequence[Finding]) -> str:
    """A line a check, its hint below it; the sum at the end."""
    width = max((len(f.name) for f in findings), default=0)
    lines = []
    for f in findings:
        lines.append(f"{_SHOWN[f.status]:<8} {f.name:<{width}}  {f.detail}")
        if f.hint and f.status != "ok":
            lines.append(f"{'':<8} {'':<{width}}  -> {f.hint}")
    failed = [f.name for f in findings if f.status == "failed"]
    lines += ["", f"{len(failed)} required: {', '.join(failed)}" if failed else "everything required is here"]
    return "\n".join(lines)


@dataclass(frozen=True)
class Output:
    """Output of a program. `code` is None where it could not be run or did not end in time."""

    code: int | None
    out: str
    err: str = ""


def run_program(command: Sequence[str], timeout_s: float = 30.0, env: dict[str, str] | None = None) -> Output:
    """Runs a program and captures its output. Raises nothing."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return Output(None, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Output(None, "", str(error))
    return Output(done.returncode, done.stdout.strip(), done.stderr.strip())


def last_line(text: str) -> str:
    """The last line that is not empty: where programs print their error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

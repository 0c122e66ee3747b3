"""Commands of a page, run as printed, in a folder that looks like the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.helpers.mpi import ROOT, forking_python, rank_environment

_LINKED = (".venv", "assets", "launch", "megatron_tlt", "slurm", "tools")
_COPIED = ("configs", "examples")  # paths in their files count from the files: through a link, from the repository's


def commands(text: str) -> list[str]:
    """The indented blocks of a Markdown text, one shell command each."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def make_folder(folder: Path) -> Path:
    """Links or copies the repository's parts into `folder`, from which the commands run."""
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name)
    return folder


def run_as_printed(folder: Path, printed: list[str]) -> None:
    """Runs every command in `folder`; ranks of `launch/local.sh` are forks. Fails with the failing command's output."""
    environment = rank_environment() | {"PYTHON": str(forking_python(folder))}
    for command in printed:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"

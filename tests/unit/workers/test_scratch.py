"""Directories that killed processes left go, those of living ones stay."""

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from megatron_tlt.workers.scratch import OF_MACHINE, ScratchDirectory, sweep_scratch

KILLED = """
import os, signal
from megatron_tlt.workers.scratch import ScratchDirectory
made = ScratchDirectory()
(made.path / "weights").write_text("of a drafter")
print(made.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory, of processes that are started, too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_directories_of_weights_stay_while_they_are_young_or_their_owner_holds_a_lock(
    tmp_path: Path, temporary: Path
) -> None:
    dead, alive = (tmp_path / name for name in ("tlt-dead", "tlt-alive"))
    for path in (dead, alive, tmp_path / "other", tmp_path / "target"):
        path.mkdir()
        (path / "0").write_text("weights")
    (tmp_path / "tlt-link").symlink_to(tmp_path / "target")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert sweep_scratch(tmp_path, young_s=3600) == []
    assert sweep_scratch(tmp_path, young_s=-1) == ["tlt-dead"]
    os.close(fd)
    assert sweep_scratch(tmp_path, young_s=-1) == ["tlt-alive"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "target", temporary.name, "tlt-link"]


def test_a_killed_process_leaves_a_directory_to_the_next_start_on_its_machine(tmp_path: Path, temporary: Path) -> None:
    left = Path(subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True).stdout.strip())
    assert (left / "weights").exists() and left.parent == temporary
    others = [temporary / name for name in ("tlt-baseline", "tlt-another_machine-12345678", f"{OF_MACHINE}my-runs")]
    for other in others:
        other.mkdir()
    with closing(ScratchDirectory()) as alive:
        assert sweep_scratch(tmp_path / "none", young_s=-1) == [left.name]
        assert sorted(temporary.iterdir()) == sorted([*others, alive.path])
    alive.close()
    assert sorted(temporary.iterdir()) == sorted(others)

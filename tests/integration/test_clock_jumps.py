"""A wall clock that jumps by days and years while two ranks train: same weights, sound durations."""

import json
import subprocess
import time

import pytest

from megatron_tlt.models.native.build import find_compiler
from megatron_tlt.observe.events import read_events
from tests.helpers.mpi import ROOT, run_ranks
from tests.helpers.runs import assert_same_checkpoint, rows, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.fixture
def jumping(tmp_path):
    """The environment of processes whose wall clock jumps."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler to build the jumping clock with")
    library = tmp_path / "jumping_clock.so"
    source = ROOT / "tests/helpers/jumping_clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.nightly
def test_a_jumping_wall_clock_changes_nothing(jumping, tmp_path):
    config = write_config(
        tmp_path, train={"num_steps": 3, "prompts_per_step": 8, "run_dir": str(tmp_path / "run")}
    )
    looks = run_ranks(
        1, ["-c", "import time; print(*[time.time() for _ in range(500)])"], env=jumping
    ).stdout.split()
    assert max(map(float, looks)) - min(map(float, looks)) > 86400  # it does jump
    run_dir, command = tmp_path / "jumping", ["-m", "megatron_tlt"]
    started = time.monotonic()
    run_ranks(2, command, "train", str(config), f"train.run_dir={run_dir}", env=jumping)
    most = time.monotonic() - started
    run_ranks(2, command, "train", str(config))
    assert_same_checkpoint(tmp_path / "run/checkpoints/step-000003", run_dir / "checkpoints/step-000003")
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]
    for row in rows(run_dir):
        times = {
            name: value
            for name, value in row.items()
            if name.startswith(("time/", "idle/")) and value is not None
        }
        assert all(0.0 <= value <= (1e3 if "_ms" in name else 1.0) * most for name, value in times.items()), (
            times
        )
    stamps = [row["time"] for row in rows(run_dir)]
    assert stamps == sorted(stamps) and stamps[-1] - stamps[0] <= most
    for rank in range(2):
        events = read_events(run_dir, rank)
        opened = events[0]["ts"]
        assert all(opened <= e["ts"] and 0.0 <= e.get("dur", 0.0) <= most for e in events)
        assert all(e["ts"] + e.get("dur", 0.0) <= opened + most for e in events)
    assert json.loads((run_dir / "summary.json").read_text())["seconds"] <= most

"""Checkpoints of the actor: resume bit for bit, other layouts, damage, SIGKILL while saving."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.actor import checkpoint_files as files
from tests.helpers.mpi import MPIEXEC, ROOT, rank_environment, run_ranks
from tests.mpi.workers.actor_common import results
from tests.numerics.actor_expected import expected_root

WORKER = "tests/mpi/workers/actor_checkpoint.py"


def launch(ranks: int, *commands: str) -> list[dict[str, Any]]:
    """One launch for several commands of the worker."""
    return results(run_ranks(ranks, WORKER, str(expected_root()), " + ".join(commands)).stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one_rank(place: Path) -> list[dict[str, Any]]:
    commands = [
        f"{verb} {place}/{name} {layout}" for name, layout in VARIANTS.items() for verb in ("save", "load")
    ]
    return launch(1, *commands, f"refuse {place}/adam")


VARIANTS = {"adam": "{}", "sgd": '{"sgd":true}', "bf16": '{"dtype":"bf16"}'}
SHARDED = '{"tp":2,"distributed_optimizer":"on"}'
FOUR = ['{"tp":2,"pp":2}', '{"pp":2}', '{"tp":4,"sequence_parallel":true}', "{}"]


@pytest.fixture(scope="module")
def four_ranks(place: Path, one_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return launch(
        4,
        f"save {place}/four {FOUR[0]}",
        *(f"load {place}/four {layout}" for layout in FOUR),
        f'load {place}/adam {{"tp":2}}',
        f"save {place}/zero {SHARDED}",
        f"load {place}/zero {SHARDED}",
        f'load {place}/zero {{"distributed_optimizer":"on"}}',
    )


@pytest.mark.parametrize("which", range(len(VARIANTS)))
def test_resumed_equals_uninterrupted_bit_for_bit(one_rank: list[dict[str, Any]], which: int) -> None:
    loaded = [r for r in one_rank if r["case"] == "load"][which]
    assert loaded["same_bits"]
    assert loaded["same_lr"]
    assert loaded["grad_norm"] == 0.0
    assert loaded["version"] == 3
    assert loaded["extra"] == {"data": [1, 2], "name": "x"}


def test_saving_blocks_for_well_under_a_second(one_rank: list[dict[str, Any]]) -> None:
    assert all(r["blocking"] < 1.0 for r in one_rank if r["case"] == "save")


def test_another_optimizer_or_model_is_refused(one_rank: list[dict[str, Any]]) -> None:
    errors = {r["label"]: r["error"] for r in one_rank if r["case"] == "refuse"}
    assert "optimizer is 'adam', not 'sgd'" in errors["sgd"]
    assert "family is 'qwen3', not 'llama'" in errors["model"]


def test_the_same_layout_resumes_bit_for_bit(four_ranks: list[dict[str, Any]]) -> None:
    loads = [r for r in four_ranks if r["case"] == "load"]
    plain, sharded = loads[0], loads[len(FOUR) + 1]
    assert plain["same_bits"]
    assert sharded["same_bits"]


def test_other_layouts_load_and_go_on(four_ranks: list[dict[str, Any]]) -> None:
    loads = [r for r in four_ranks if r["case"] == "load"]
    assert len(loads) == 7
    assert all(r["weights"] <= 1e-5 for r in loads), loads


def kill_while_saving(checkpoints: Path) -> int:
    """Runs two ranks that save after every update, kills all of them at a random moment after the fifth."""
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "mpi4py", str(ROOT / WORKER)]
    process = subprocess.Popen(
        [*command, str(expected_root()), f"forever {checkpoints}"],
        env=rank_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    saved = 0
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("SAVED"):
            saved = int(line.split()[1])
        if saved >= 5:
            break
    time.sleep(random.uniform(0.0, 0.3))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return saved


def damaged_copies(place: Path) -> None:
    """Directories made from a run with three checkpoints: 2, 3 and 4, in each of which something is wrong."""
    good = place / "adam" / "step-000002"
    for name in ("torn", "altered", "unfinished", "hopeless"):
        for step in (2, 3):
            shutil.copytree(good, place / name / f"step-{step:06d}")
        files.write_synced(place / name / files.LATEST, "step-000003\n")
    shard = next((place / "torn" / "step-000003").glob("*.distcp"))
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    for name in ("altered", "hopeless"):
        flip_a_byte(next((place / name / "step-000003").glob("*.distcp")))
    flip_a_byte(next((place / "hopeless" / "step-000002").glob("*.distcp")))
    (place / "unfinished" / "step-000003" / files.MANIFEST).unlink()


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def resumed(place: Path, one_rank: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    saved = kill_while_saving(place / "killed")
    damaged_copies(place)
    found = launch(
        1,
        f"resume {place}/killed auto",
        f"resume {place}/torn auto",
        f"resume {place}/altered auto",
        f"resume {place}/unfinished auto",
        f"resume {place}/hopeless auto",
        f"resume {place}/altered {place}/altered/step-000003",
        f"resume {place}/altered never",
        f"resume {place}/empty auto",
    )
    return saved, found


def test_sigkill_while_saving_leaves_latest_good(
    resumed: tuple[int, list[dict[str, Any]]], place: Path
) -> None:
    saved, found = resumed
    assert found[0]["found"] == (place / "killed" / files.LATEST).read_text().strip()
    assert found[0]["extra"]["step"] >= saved
    # keep=3, and perhaps one that was just being pruned.
    assert len(files.complete_steps(place / "killed")) <= 4


@pytest.mark.parametrize("which", [1, 2, 3])
def test_auto_passes_over_a_damaged_checkpoint(resumed: tuple[int, list[dict[str, Any]]], which: int) -> None:
    assert resumed[1][which]["found"] == "step-000002"


def test_a_damaged_checkpoint_asked_for_is_refused_by_name(resumed: tuple[int, list[dict[str, Any]]]) -> None:
    error = resumed[1][5]["error"]
    assert "step-000003 is damaged" in error
    assert "was altered" in error
    assert "step-000002, which is whole" in error


def test_only_damaged_checkpoints_do_not_start_anew_silently(
    resumed: tuple[int, list[dict[str, Any]]],
) -> None:
    assert "every checkpoint" in resumed[1][4]["error"]


def test_never_and_nothing_start_anew(resumed: tuple[int, list[dict[str, Any]]]) -> None:
    assert resumed[1][6]["found"] is None
    assert resumed[1][7]["found"] is None

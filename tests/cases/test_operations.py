"""Surroundings that real runs meet: launchers inside launchers, closed streams, full disks, limits, a failing W&B."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from megatron_tlt.cli.ranks import failure_text, is_timeout
from megatron_tlt.config.run import ObserveSection
from megatron_tlt.errors import BackendError
from megatron_tlt.observe.jsonl import StepFile, read_rows
from megatron_tlt.observe.metrics import METRICS_FILE, MetricsLogger, wandb_problems


def test_closed_streams_are_as_dev_null() -> None:
    """Services and cron start programs so. `check` reads files: none may get the number of a closed stream."""
    command = [sys.executable, "-m", "megatron_tlt", "check", "configs/quickstart.yaml"]

    def close() -> None:
        os.closerange(0, 3)

    ended = subprocess.run(command, preexec_fn=close, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_full_disk_is_one_line_with_the_file(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(rank=1, where="phase log, step 3")
    file = StepFile(tmp_path / "rows.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
    with pytest.raises(OSError) as caught:
        file.write_rows(1, {"a": 1})
    text = failure_text(world, caught.value, None)
    assert text == (
        "megatron-tlt: rank 1 failed in phase log, step 3: OSError: [Errno 28] No space left on device: "
        f"'{tmp_path / 'rows.jsonl'}'"
    )
    assert failure_text(world, OSError(errno.EINVAL, "a mistake of ours"), None).count("\n") > 0


@pytest.mark.parametrize(
    ("where", "setting"),
    [
        ("phase update, step 3", "actor.micro_batch_tokens"),
        ("phase rollout, step 3", "rollout.kv_cache_mib"),
        ("phase eval", "rollout.max_batched_tokens"),
    ],
)
def test_a_lack_of_the_gpu_s_memory_names_settings_of_its_phase(where: str, setting: str) -> None:
    world: Any = SimpleNamespace(rank=1, where=where)
    text = failure_text(world, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), None)
    assert setting in text and "2.00 GiB" in text and "Traceback" not in text


def test_only_collectives_and_their_store_wait_in_vain() -> None:
    """Other errors that name a timeout are not reported as ranks that did not arrive."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set_timeout(timedelta(seconds=0.1))  # of the wait alone: on a busy machine its own connection may take longer
    with pytest.raises(RuntimeError) as caught:
        store.get("never set")
    assert is_timeout(caught.value)
    others = KeyError("timeout_s"), TimeoutError("timed out"), BackendError("vLLM: timeout"), RuntimeError("timeout")
    for error in others:
        assert not is_timeout(error)


@pytest.mark.parametrize(
    ("limit", "size", "says"),
    [
        (128, 1, "may have 128 open files: a rank of 1 needs 260"),
        (2000, 512, "a rank of 512 needs 2304"),
        (4000, 512, "4000, 4000"),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(limit: int, size: int, says: str) -> None:
    program = (
        f"import resource; from megatron_tlt.distributed.world import allow_open_files; allow_open_files({size}); "
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{program} print(resource.getrlimit(resource.RLIMIT_NOFILE))"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 512), limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert says in ended.stdout + ended.stderr


class FailingWandb:
    """W&B whose calls fail after the first `good` ones: without a server or a key, or after its core was killed."""

    def __init__(self, good: int):
        self.calls, self.good, self.id = 0, good, "abc"

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > self.good:
            raise ConnectionResetError("the core is gone")
        return self

    init = define_metric = log = finish = Table = _call


@pytest.mark.parametrize("good", [0, 4, 9])
def test_a_failing_wandb_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    service = FailingWandb(good)
    monkeypatch.setitem(sys.modules, "wandb", service)
    logger = MetricsLogger(tmp_path, ObserveSection(wandb_project="p", tensorboard=False), 0)
    for step in (1, 2):
        logger.log(step, {"a": 1.0})
        logger.log_samples(step, [{"response": "x"}])
    logger.close()
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2]
    assert service.calls == good + 1, "no call after the first that failed"


@pytest.mark.parametrize("project", ["team/project", "", "a#b", "x" * 129])
def test_a_project_that_wandb_refuses_is_refused_by_name(project: str) -> None:
    (problem,) = wandb_problems(project)
    assert problem.path == "observe.wandb_project" and "WANDB_ENTITY" in problem.allowed

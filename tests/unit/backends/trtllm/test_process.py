"""Errors for child processes that break the protocol."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from megatron_tlt.backends import process as process_module
from megatron_tlt.backends import remote, transport
from megatron_tlt.backends.process import EngineProcess, child_environment
from megatron_tlt.backends.serving import line_of
from megatron_tlt.backends.trtllm.launch import trtllm_launch
from megatron_tlt.config.engine_process import TrtllmSection
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.types import GenerateCall, SamplingParams
from megatron_tlt.workers import scratch
from megatron_tlt.workers.scratch import sweep_scratch
from tests.helpers.fake_decoder import PROMPTS
from tests.helpers.mpi import ROOT
from tests.helpers.trtllm_engines import child, python_with
from tests.unit.backends.vllm.test_turns import make_backend
from tests.unit.envs.test_pool import have_ended

HELLO = {"type": "hello", "engine": "1.2.1", "device": "cuda"}
BEAT = line_of({"type": "beat", "in_flight": 1, "last_request": 1, "steps": 7, "lengths": [3]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x00\x00\x05hello\n", "sent no valid message"),
        (b"GET / HTTP/1.1\r\n\r\n", "sent no valid message"),
        (line_of({"type": "hello"}), "is TensorRT-LLM None"),
        (line_of({**HELLO, "engine": "1.4.0rc1"}), "is TensorRT-LLM 1.4.0rc1, must be 1.2.x or 1.3.x"),
    ],
)
def test_a_child_with_a_wrong_hello_is_killed_and_leaves_its_log(
    tmp_path: Path, logs: Path, data: bytes, message: str
) -> None:
    started = time.monotonic()
    with pytest.raises(BackendError) as caught:
        EngineProcess(trtllm_launch(TrtllmSection(python=child(tmp_path, data))))
    assert time.monotonic() - started < 120, "killed, not waited for"
    assert message in str(caught.value)
    assert "the child was here" in str(caught.value), "the end of the log"
    pid = int(str(caught.value).split("(process ")[1].split(")")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (log,) = logs.iterdir()
    assert f"log ({log})" in str(caught.value) and log.read_text() == "the child was here\n"
    log.unlink()


@pytest.mark.parametrize(
    ("after", "again", "message"),
    [
        (b"\xff\xff\xff\xff\n", b"", "sent no valid message"),
        (line_of({"type": "reply", "call": 7}), b"", "sent 'reply' while stats 1 was waited for"),
        (line_of({"type": "reply", "call": 0}), b"", "sent 'reply' while stats 1 was waited for"),
        (line_of({"type": "surprise"}), b"", "sent 'surprise'"),
        (b"", b"", "sent no heartbeat for 1 s"),
        (b"", BEAT, "sent heartbeats, but no reply to stats, for 2 s"),
    ],
)
def test_a_child_that_goes_wrong_later_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bytes, again: bytes, message: str
) -> None:
    monkeypatch.setattr(process_module, "SILENCE_S", 1.0)
    process = EngineProcess(trtllm_launch(TrtllmSection(python=child(tmp_path, line_of(HELLO) + after, again))))
    monkeypatch.setattr(process_module, "START_S", 2.0)
    with pytest.raises(BackendError, match=message):
        process.call("stats")
    assert not process.is_alive and not process.shared.path.exists()
    process.close()
    with pytest.raises(BackendError, match="killed or closed"):
        process.call("stats")


def test_an_engine_that_hangs_gives_no_progress_and_is_killed_at_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go on. The checkpoint of a stopped run is saved without it."""
    monkeypatch.setattr(remote, "END_S", 1.0)
    process = EngineProcess(trtllm_launch(TrtllmSection(python=child(tmp_path, line_of(HELLO), BEAT))))
    backend, looks, reports = make_backend(process), count(1), list[tuple[int, ...]]()

    def look() -> None:
        if next(looks) == 5:
            raise KeyboardInterrupt

    call = GenerateCall(PROMPTS[:1], SamplingParams(max_tokens=4), check_interrupt=look)
    with pytest.raises(KeyboardInterrupt):
        backend.generate(replace(call, on_progress=lambda *of: reports.append(of)))
    assert reports == [(1, 0, 0)] and not process.is_alive
    assert backend.state_dict().keys() == {"history"}


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select.select` takes; ranks of large jobs have as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in opened:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_short_waits_return_and_their_silence_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the rank looks at something else."""
    monkeypatch.setattr(process_module, "SILENCE_S", 1.0)
    sent = line_of(HELLO) + line_of({"type": "response", "id": 3})
    process = EngineProcess(trtllm_launch(TrtllmSection(python=child(tmp_path, sent))))
    assert process.next_response(60.0) == {"type": "response", "id": 3}
    assert process.next_response(0.02) is None
    with pytest.raises(BackendError, match="sent no heartbeat for 1 s"):
        all(process.next_response(0.02) is None for _ in range(1000))


def test_a_log_stays_while_its_engine_lives_and_goes_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = EngineProcess(trtllm_launch(TrtllmSection(python=child(tmp_path, line_of(HELLO)))))
    log = process._log
    monkeypatch.setattr(scratch, "_LOG_S", -1.0)
    sweep_scratch(tmp_path / "none")
    assert log.exists() and str(log) in str(process.failure("fails"))
    monkeypatch.undo()
    assert log.name not in sweep_scratch(tmp_path / "none", young_s=-1), "it is to be read for a week"
    monkeypatch.setattr(scratch, "_LOG_S", -1.0)
    assert log.name in sweep_scratch(tmp_path / "none")


def test_a_child_that_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"(?s)ended with exit code 7 before its hello.*no engine here"):
        EngineProcess(trtllm_launch(TrtllmSection(python=python_with(tmp_path, "echo no engine here; exit 7"))))


def test_without_shared_memory_no_child_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SHARED", tmp_path / "shm")
    with pytest.raises(ConfigError, match=r"rollout\.trtllm = .*needs .*shm"):
        EngineProcess(trtllm_launch(TrtllmSection(python=python_with(tmp_path, "exit 7"))))


def test_the_child_inherits_nothing_of_the_launcher_or_of_our_python() -> None:
    ours = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **dict.fromkeys(("PMI_RANK", "PMIX_ID", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "SLURM_JOB_ID"), "1"),
        **dict.fromkeys(("HYDI_CONTROL_FD", "MPICH_X", "PMI2_X", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"), "1"),
        "PATH": "/bin",
        "HF_HOME": "/hf",
        "MPIEXEC_LIKE": "stays: no launcher's prefix",
    }
    there = child_environment(ours, "/package", trtllm_launch(TrtllmSection(python="python")).environment)
    assert there == {
        "PATH": "/bin",
        "HF_HOME": "/hf",
        "MPIEXEC_LIKE": "stays: no launcher's prefix",
        "PYTHONPATH": "/package",
        "TLLM_DISABLE_MPI": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def test_the_server_ends_with_its_parent_also_while_it_is_busy() -> None:
    program = "from megatron_tlt.backends.serving import end_with_parent\nend_with_parent(0)\nwhile True: pass"
    script = f"{shlex.quote(sys.executable)} -c '{program}' & echo $!; sleep 2"
    parent = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert have_ended([int(parent.stdout)]), "the busy process outlives its parent"

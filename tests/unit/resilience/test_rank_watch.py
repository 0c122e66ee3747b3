"""A rank's end and its real watchdog process, with a rank made of a few lines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_tlt.config.watchdog import WatchdogSection
from megatron_tlt.resilience import status_files as files
from megatron_tlt.resilience.processes import exit_status, process_state
from tests.helpers.mpi import ROOT, rank_environment

GO = "while not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.02)\nwatch.close('done')"
PRELUDE = """
    import os, signal, sys, time
    from megatron_tlt.config.watchdog import WatchdogSection
    from megatron_tlt.resilience.rank_watch import start_watch
    section = WatchdogSection(heartbeat_s=0.1, hang_s=float(sys.argv[2]))
    rank, size = int(sys.argv[3]), int(sys.argv[4])
    watch = start_watch(section, sys.argv[1], rank, size, lambda value: "a" if size > 1 else value)
    watch.enter("rollout", 4, 1)
    watch.pulse(state="BUSY", running=3, queued=2, longest=17, left=5.5)
"""


@contextmanager
def start(run_dir, body, hang_s=0.0, rank=0, size=1):
    """A process that is watched and then does `body`; a minute later it is killed."""
    script = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    command = [sys.executable, "-c", script, str(run_dir), *map(str, (hang_s, rank, size))]
    rank = subprocess.Popen(command, env=rank_environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    end = threading.Timer(60, rank.kill)
    end.start()
    try:
        with rank:
            yield rank
    finally:
        end.cancel()
        rank.kill()


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def watchdog_of(rank):
    """The process that watches `rank`: its only child."""
    (pid,) = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    return int(pid)


def beat(run_dir, of=0, **wanted):
    """A rank's beat once it says `wanted`."""

    def there():
        found = files.read_beat(files.beat_path(run_dir, of))
        return found if found and all(getattr(found, k) == v for k, v in wanted.items()) else None

    return wait_for(there)


def test_what_a_rank_says_is_in_its_beat_and_its_end_too(tmp_path):
    with start(tmp_path, GO) as rank:
        seen = beat(tmp_path, phase="rollout", longest=17)
        assert (seen.step, seen.order, seen.state, seen.running, seen.queued, seen.left) == (
            4,
            1,
            "BUSY",
            3,
            2,
            5.5,
        )
        assert (seen.pid, seen.process, seen.outcome) == (rank.pid, "S", "running")
        later = wait_for(lambda: (b := beat(tmp_path)).silent_seconds > seen.silent_seconds and b)
        assert later.seq > seen.seq
        (tmp_path / "go").touch()
    assert rank.returncode == 0
    assert beat(tmp_path).outcome == "done"
    assert files.read_verdict(tmp_path, seen.attempt) is None


@pytest.mark.parametrize("body", ["sys.exit(75)", "pass"])
def test_an_orderly_exit_without_close_is_no_crash(tmp_path, body):
    with start(tmp_path, body) as rank:
        assert rank.stderr.read() == ""
    seen = beat(tmp_path)
    assert (seen.outcome, files.read_verdict(tmp_path, seen.attempt)) == ("ended", None)


def test_a_failure_is_a_verdict(tmp_path):
    with start(tmp_path, "watch.close('failed', 'it broke'); watch.close('done'); os._exit(1)"):
        pass
    seen = beat(tmp_path, outcome="failed")
    verdict = files.read_verdict(tmp_path, seen.attempt)
    assert (verdict.kind, verdict.text, verdict.ranks, seen.detail) == ("failed", "it broke", [0], "it broke")


def test_a_killed_rank_is_named(tmp_path):
    with start(tmp_path, "time.sleep(60)") as rank:
        beat(tmp_path, phase="rollout")
        rank.kill()
        said = rank.stderr.read()  # the watchdog holds it open until it has spoken
    assert f"pid {rank.pid}) was killed by signal 9 (SIGKILL), in phase rollout, step 4" in said
    assert beat(tmp_path).outcome == "killed"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_back", [True, False])
def test_the_first_to_die_is_named_even_if_every_watchdog_slept_through_it(tmp_path, first, is_back):
    """As on a host that is so busy that the launcher ends the others before a watchdog runs."""
    with (
        start(tmp_path, "time.sleep(60)", rank=0, size=2) as one,
        start_later(tmp_path, "time.sleep(60)", rank=1, size=2) as two,
    ):
        ranks = [one, two]
        beats = [beat(tmp_path, of=n, phase="rollout", attempt="a") for n in range(2)]
        watchdogs = [watchdog_of(rank) for rank in ranks]
        for pid in watchdogs:
            os.kill(pid, signal.SIGSTOP)
        for n in (first, 1 - first):
            ranks[n].kill()
            ranks[n].wait()
            time.sleep(0.1)
        os.kill(watchdogs[1 - first], signal.SIGCONT)  # the wrong one wakes first
        if is_back:
            time.sleep(0.3)
            os.kill(watchdogs[first], signal.SIGCONT)
        verdict = wait_for(lambda: files.read_verdict(tmp_path, "a"))
        assert verdict.ranks == [first] and f"rank {first} (host " in verdict.text
        assert f"pid {beats[first].pid})" in verdict.text and "in phase rollout, step 4" in verdict.text
        os.kill(watchdogs[first], signal.SIGCONT)
        assert beat(tmp_path, of=first, outcome="killed") and beat(tmp_path, of=1 - first, outcome="ended")


@contextmanager
def start_later(run_dir, *args, **options):
    """Not before rank 0 has made the directories and cleaned them."""
    beat(run_dir, of=0, phase="rollout")
    with start(run_dir, *args, **options) as rank:
        yield rank


def test_a_child_of_the_rank_that_outlives_it_hides_nothing(tmp_path):
    """Forked without exec it holds the rank's end of the pipe: the end of the process itself is looked at."""
    body = """
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    time.sleep(60)
    """
    with start(tmp_path, body) as rank:
        beat(tmp_path, phase="rollout")
        time.sleep(0.3)
        rank.kill()
        assert beat(tmp_path, outcome="killed").phase == "rollout"
        rank.stderr.close()


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
        "import ctypes\nwhile True: ctypes.PyDLL(None).sleep(600)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "import threading; threading.Event().wait()",
    ],
    ids=["spin", "regex", "gil", "stopped", "lock"],
)
def test_a_hang_ends_with_stacks_whatever_holds_the_rank(tmp_path, body):
    with start(tmp_path, body, hang_s=1.5) as rank:
        said = rank.stderr.read()
    assert rank.returncode == -signal.SIGKILL
    assert "the job hangs: rank 0 (host " in said and "in phase rollout, step 4, silent for" in said
    assert "<string>" in files.stacks_path(tmp_path, 0).read_text()
    seen = beat(tmp_path, outcome="hung")
    assert files.read_verdict(tmp_path, seen.attempt).kind == "hung"


def test_signs_of_life_keep_a_slow_rank_alive(tmp_path):
    body = "for _ in range(40): time.sleep(0.1); watch.pulse()\nwatch.close('done')"
    with start(tmp_path, body, hang_s=1.5) as rank:
        assert rank.stderr.read() == ""
    assert rank.returncode == 0


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path):
    """As by `scontrol suspend`: the watchdog sees that it was away itself."""
    body = "end = time.monotonic() + 16\nwhile time.monotonic() < end: time.sleep(0.1)\nwatch.close('done')"
    with start(tmp_path, body, hang_s=14.0) as rank:
        beat(tmp_path, phase="rollout")
        watchdog = watchdog_of(rank)
        for pid in (rank.pid, watchdog):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(11.5)
        for pid in (rank.pid, watchdog):
            os.kill(pid, signal.SIGCONT)
        assert rank.stderr.read() == ""
    assert rank.returncode == 0
    assert beat(tmp_path).outcome == "done"


def test_a_killed_watchdog_is_started_anew(tmp_path):
    body = """
    import logging
    logging.basicConfig()
    for i in range(40):
        time.sleep(0.1)
        watch.enter("push", 5 + i, 2 + i)
    watch.close("done")
    """
    with start(tmp_path, body) as rank:
        beat(tmp_path, phase="push")
        os.kill(watchdog_of(rank), signal.SIGKILL)
        assert rank.stderr.read().count("the watchdog of this rank ended with -9") == 1
    assert beat(tmp_path).outcome == "done"


def test_a_run_directory_that_cannot_be_written_ends_no_rank(tmp_path):
    with start(tmp_path, GO) as rank:
        beat(tmp_path, phase="rollout")
        shutil.rmtree(tmp_path / "status")
        time.sleep(0.5)
        (tmp_path / "go").touch()
        said = rank.stderr.read()
    assert rank.returncode == 0
    assert said.count("heartbeats cannot be written") == 1


def test_phases_get_their_limit_from_their_own_history(tmp_path):
    times = iter(range(0, 10_000, 10))
    from megatron_tlt.resilience.rank_watch import WatchdogClient

    files.begin_attempt(tmp_path)
    section = WatchdogSection(slow_factor=2.0, slow_min_s=1.0, heartbeat_s=100)
    watch = WatchdogClient(section, tmp_path, 0, 1, "a", clock=lambda: float(next(times)))
    limits = []
    for order in range(1, 10):
        watch.enter("rollout" if order % 2 else "update", 0, order)
        limits.append(watch._block.read().limit)
    watch.close("done")
    assert limits == [0.0] * 6 + [20.0] * 3  # three of each were seen, ten seconds long


def test_what_the_kernel_says():
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert process_state(rank.pid) in "RSD"
    os.kill(rank.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(rank.pid) == "T")
    assert exit_status(rank.pid) == ""
    rank.kill()
    wait_for(lambda: process_state(rank.pid) == "Z")
    assert exit_status(rank.pid) == "was killed by signal 9 (SIGKILL)"
    rank.wait()
    assert (process_state(rank.pid), exit_status(rank.pid)) == ("?", "")
    left = subprocess.Popen([sys.executable, "-c", "import os; os._exit(7)"])
    wait_for(lambda: process_state(left.pid) == "Z")
    assert exit_status(left.pid) == "left with exit code 7, without a word"
    left.wait()


def test_the_watchdog_is_no_rank(tmp_path):
    """It must not believe a launcher's variables, and costs little."""
    with start(tmp_path, GO) as rank:
        beat(tmp_path, phase="rollout")
        pid = watchdog_of(rank)
        proc = Path("/proc") / str(pid)
        names = {v.split("=")[0] for v in (proc / "environ").read_text().split("\0")}
        resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        mapped = (proc / "maps").read_text()
        assert os.getsid(pid) == pid
        (tmp_path / "go").touch()
    assert not [name for name in names if name.startswith(("PMI", "OMPI", "SLURM", "MPI"))]
    assert resident < 40 * 2**20
    assert "torch" not in mapped and "numpy" not in mapped


def test_json_only(tmp_path):
    with start(tmp_path, GO):
        beat(tmp_path, phase="rollout")
        (tmp_path / "go").touch()
    for path in files.status_dir(tmp_path).glob("*.json"):
        json.loads(path.read_text())

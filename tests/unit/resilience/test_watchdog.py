"""The real watchdog process, with ranks made of a few lines."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatron_tlt.resilience.heartbeat import StatusFiles
from tests.helpers.mpi import ROOT, rank_environment

PRELUDE = """
    import os, signal, sys, time
    from megatron_tlt.config.run import WatchdogSection
    from megatron_tlt.resilience.watchdog import Options
    from megatron_tlt.resilience.watchdog_client import WatchdogClient, launch
    run_dir, hang_s, rank, size, address = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    if not address:
        address = launch(Options(run_dir, "a", size, 0.1, hang_s))
    else:
        address = chr(0) + address
    watchdog = WatchdogClient(WatchdogSection(heartbeat_s=0.1, hang_s=hang_s), run_dir, rank, address)
    print(address.lstrip(chr(0)), flush=True)
    watchdog.enter("rollout", 4, 1)
    watchdog.report(state="BUSY", running=3, queued=2, longest=17, left=5.5)
"""
WAIT = "while not os.path.exists(run_dir + '/go'): time.sleep(0.02)\n"
GO = WAIT + "watchdog.close('done')"


@contextmanager
def start(run_dir, *bodies, hang_s=0.0):
    """One process a body, watched by one watchdog; a minute later they are killed."""
    StatusFiles(run_dir).clear()
    address, ranks = "", []
    with ExitStack() as stack:
        for number, body in enumerate(bodies):
            script = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
            numbers = [str(run_dir), *map(str, (hang_s, number, len(bodies))), address]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            rank = subprocess.Popen(
                [sys.executable, "-c", script, *numbers], env=rank_environment(), cwd=ROOT, **pipes
            )
            ranks.append(rank)
            end = threading.Timer(60, rank.kill)
            end.start()
            stack.enter_context(rank)
            stack.callback(rank.kill)
            stack.callback(end.cancel)
            address = rank.stdout.readline().strip()
            assert address, rank.stderr.read()
        yield ranks[0] if len(ranks) == 1 else ranks


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def watchdog_of(rank):
    """The watchdog that `rank` started: its only child."""
    (pid,) = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    return int(pid)


def beat(run_dir, rank=0, **expected):
    """A rank's heartbeat once it has these values."""

    def there():
        found = StatusFiles(run_dir).read_heartbeats("a")[0].get(rank)
        return found if found and all(getattr(found, k) == v for k, v in expected.items()) else None

    return wait_for(there)


def go(run_dir, size=2):
    """Lets `WAIT` pass once all ranks are connected."""
    for rank in range(size):
        beat(run_dir, rank, phase="rollout")
    (run_dir / "go").touch()


def end_of(run_dir):
    return StatusFiles(run_dir).read_end("a")


def test_reports_and_orderly_ends_are_in_the_heartbeats(tmp_path):
    with start(tmp_path, GO, "sys.exit(75)") as (rank, left):
        seen = beat(tmp_path, phase="rollout", longest=17)
        assert (seen.step, seen.order, seen.state, seen.running, seen.queued, seen.left) == (
            4,
            1,
            "BUSY",
            3,
            2,
            5.5,
        )
        assert (seen.pid, seen.outcome) == (rank.pid, "running") and seen.process in "RS"
        later = wait_for(lambda: (b := beat(tmp_path)).silent_seconds > seen.silent_seconds and b)
        assert later.seq > seen.seq
        assert beat(tmp_path, 1, outcome="ended").pid == left.pid  # without `close`: not a crash
        (tmp_path / "go").touch()
        assert rank.stderr.read() == ""
    assert rank.returncode == 0
    assert beat(tmp_path).outcome == "done" and end_of(tmp_path) is None


def check_end(run_dir, at_fault, outcome, text):
    culprit, end = beat(run_dir, at_fault, outcome=outcome), end_of(run_dir)
    assert end.ranks == [at_fault] and text in end.text
    if outcome == "killed":
        assert f"rank {at_fault} (host {culprit.host}, pid {culprit.pid}) " in end.text
        assert "in phase rollout, step 4" in end.text


def test_a_failed_rank_is_named_and_the_others_are_ended(tmp_path):
    """There is no launcher here that would end them."""
    fails = WAIT + "watchdog.close('failed', 'it broke'); watchdog.close('done'); os._exit(1)"
    with start(tmp_path, fails, "time.sleep(60)") as ranks:
        go(tmp_path)
        check_end(tmp_path, 0, "failed", "it broke")
        assert ranks[1].wait(30) == -signal.SIGKILL
        assert beat(tmp_path, 1, outcome="ended")


FORKS = "os.fork() or os.setsid() or time.sleep(20)\n"  # without exec, the child holds the rank's end of the socket


@pytest.mark.parametrize(
    ("first", "second", "at_fault", "text"),
    [
        (GO, "time.sleep(0.5); os._exit(3)", 1, "exit code 3"),
        (FORKS + "time.sleep(1); os.kill(os.getpid(), 9)", GO, 0, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_rank_that_ends_without_an_error_message_is_named(tmp_path, first, second, at_fault, text):
    with start(tmp_path, first, second):
        check_end(tmp_path, at_fault, "killed", text)


def test_an_error_that_a_death_caused_does_not_hide_the_death(tmp_path):
    """The error arrives first: a killed process closes its connections before the kernel reports its end."""
    dies, fails = WAIT + "time.sleep(0.1); os.kill(os.getpid(), 9)", WAIT + "watchdog.close('failed', 'closed by peer')"
    with start(tmp_path, dies, fails):
        go(tmp_path)
        check_end(tmp_path, 0, "killed", "rank 0 (host ")


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_to_die_is_named_even_if_the_watchdog_slept_through_it(tmp_path, first):
    """As on a host that is so busy that the launcher ends the others before the watchdog runs."""
    with start(tmp_path, *["for _ in range(600): time.sleep(0.1); watchdog.report()"] * 2) as ranks:
        for number in range(2):
            beat(tmp_path, number, phase="rollout")
        pid = watchdog_of(ranks[0])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # reports queue up
        for number in (first, 1 - first):
            ranks[number].kill()
            ranks[number].wait()
        os.kill(pid, signal.SIGCONT)
        check_end(tmp_path, first, "killed", "(killed?)")
        assert beat(tmp_path, 1 - first, outcome="ended")


def test_a_death_is_in_the_phase_that_was_reported_last(tmp_path):
    """Reports wait in the queue when the death is heard of."""
    dies = "watchdog.enter('reward', 4, 2); watchdog.enter('score', 5, 3); os.kill(os.getpid(), 9)"
    with start(tmp_path, GO, WAIT + dies) as ranks:
        for number in range(2):
            beat(tmp_path, number, phase="rollout")
        pid = watchdog_of(ranks[0])
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        ranks[1].wait()
        os.kill(pid, signal.SIGCONT)
        assert beat(tmp_path, 1, outcome="killed").phase == "score"
        assert "in phase score, step 5" in end_of(tmp_path).text


HANGS = {
    "gil": "import ctypes\nwhile True: ctypes.PyDLL(None).sleep(600)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "lock": "import threading; threading.Event().wait()",
}


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS)
def test_a_hang_ends_with_stacks_whatever_holds_the_rank(tmp_path, body):
    with start(tmp_path, body, hang_s=1.5) as rank:
        said = rank.stderr.read()
    assert rank.returncode == -signal.SIGKILL
    assert "the job hangs: rank 0 (host " in said and "in phase rollout, step 4, silent for" in said
    assert "<string>" in StatusFiles(tmp_path).stacks_of(0).read_text()
    assert beat(tmp_path, outcome="hung") and end_of(tmp_path).outcome == "hung"


def test_a_timeout_gathers_stacks_and_names_the_rank_behind(tmp_path):
    behind = "time.sleep(60)"
    late = WAIT + "watchdog.enter('exchange', 4, 2); watchdog.close('timeout', 'it timed out')"
    with start(tmp_path, late, behind) as ranks:
        go(tmp_path)
        said = ranks[0].stderr.read()
        assert [rank.wait(30) for rank in ranks] == [-signal.SIGKILL] * 2
    assert "it timed out; the stacks of all 2 ranks are in" in said
    assert beat(tmp_path, 1, outcome="hung") and beat(tmp_path, 0, outcome="ended")


def test_signs_of_life_keep_a_rank_alive_and_so_does_being_stopped_with_the_watchdog(tmp_path):
    """As by `scontrol suspend`: the watchdog sees that it was stopped itself."""
    body = GO.replace("time.sleep", "watchdog.report(); time.sleep")
    with start(tmp_path, body, hang_s=2.0) as rank:
        beat(tmp_path, phase="rollout")
        time.sleep(3)
        pids = rank.pid, watchdog_of(rank)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(11)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        (tmp_path / "go").touch()
        assert rank.stderr.read() == ""
    assert rank.returncode == 0 and beat(tmp_path).outcome == "done"


def test_a_full_disk_ends_no_run_and_is_warned_of_once(tmp_path):
    with start(tmp_path, GO) as rank:
        beat(tmp_path, phase="rollout")
        (tmp_path / "status").rename(tmp_path / "gone")
        time.sleep(0.5)
        (tmp_path / "go").touch()
        said = rank.stderr.read()
    assert rank.returncode == 0 and said.count("heartbeats cannot be written") == 1

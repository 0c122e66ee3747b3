"""The watchdog of one host, with ranks that are processes of a few lines."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, contextmanager

import pytest

from megatron_tlt.resilience import watchdog as module
from megatron_tlt.resilience.status import read_status
from megatron_tlt.resilience.status_files import JobEnd, RankStatus, StatusFiles
from megatron_tlt.resilience.watchdog import Watchdog, WatchdogOptions
from tests.helpers.mpi import ROOT, rank_environment

RANK = """
    import ctypes, os, signal, sys, threading, time
    from megatron_tlt.resilience.heartbeat import Heartbeat
    from megatron_tlt.resilience.status_files import RankStatus
    run_dir, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    heartbeat = Heartbeat(run_dir, RankStatus("a", rank, size, "n0", os.getpid(), heartbeat_s=0.1))
    heartbeat.enter("rollout", 4)
    print(flush=True)
    sys.stdin.read(1)  # until the watchdog watches
"""
DONE = "heartbeat.close('done')"
POLLS = "while True: heartbeat.report(); time.sleep(0.02)"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "_LAUNCHER_S", 0.3)
    monkeypatch.setattr(module, "_LOOK_S", 0.1)


@contextmanager
def ranks_of(run_dir, *bodies):
    """One process a body, each waiting to be let go."""
    StatusFiles(run_dir).clear()
    with ExitStack() as stack:
        ranks = []
        for number, body in enumerate(bodies):
            code = textwrap.dedent(RANK) + body
            command = [sys.executable, "-c", code, str(run_dir), str(number), str(len(bodies))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            rank = stack.enter_context(subprocess.Popen(command, env=rank_environment(), cwd=ROOT, **pipes))
            stack.callback(rank.kill)
            ranks.append(rank)
        for rank in ranks:
            assert rank.stdout.readline()
        yield ranks


def watchdog_of(run_dir, ranks, hang_s=0.0, size=None, clock=time.monotonic):
    pids = {number: rank.pid for number, rank in enumerate(ranks)}
    return Watchdog(WatchdogOptions(str(run_dir), "a", size or len(ranks), pids, hang_s), clock)


def watch(run_dir, *bodies, **options):
    """Lets the ranks go under a watchdog, until all have ended; the state of the run, and the ranks' exit codes."""
    with ranks_of(run_dir, *bodies) as ranks:
        watchdog = watchdog_of(run_dir, ranks, **options)
        for rank in ranks:
            rank.stdin.close()
        watchdog.run()
        return read_status(run_dir), [rank.wait() for rank in ranks]


def test_ranks_that_end_orderly_are_not_named(tmp_path, capfd):
    status, codes = watch(tmp_path, DONE, "sys.exit(75)")
    assert (codes, status.end) == ([0, 75], None)
    assert [row.condition for row in status.rows] == ["ended", "done"]
    assert capfd.readouterr().err == ""


FORKS = "os.fork() or os.setsid() or time.sleep(1)\n"  # a child that outlives its rank and holds its files


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("heartbeat.enter('score', 5); " + DIES, "phase score, step 5"),
        (FORKS + DIES, "phase rollout, step 4"),
        ("os._exit(3)", "phase rollout, step 4"),
    ],
)
def test_a_rank_that_ends_without_an_error_message_is_named_with_its_phase(tmp_path, capfd, body, where):
    status, codes = watch(tmp_path, POLLS, body)
    assert codes[0] == -signal.SIGKILL, "no launcher ends the other rank, so the watchdog does"
    name = status.rows[0].status.name
    assert (status.rows[0].status.rank, status.rows[0].condition, status.rows[1].condition) == (1, "killed", "ended")
    causes = "(killed? out of memory? a second Ctrl-C?)"
    assert status.end.text.startswith(f"{name} ended without an error message {causes}, in {where}; ")
    assert capfd.readouterr().err == f"megatron-tlt: {status.end.text}\n"


def test_an_error_that_a_death_caused_does_not_hide_the_death(tmp_path):
    """The error comes first: a killed process closes its connections before the kernel reports its end."""
    fails = "heartbeat.close('failed', 'connection closed by peer'); os._exit(1)"
    status, _ = watch(tmp_path, fails, "time.sleep(0.1); " + DIES)
    assert (status.end.outcome, status.end.ranks) == ("killed", [1])


def test_a_failed_rank_is_named_and_the_others_are_ended(tmp_path, capfd):
    status, codes = watch(tmp_path, "heartbeat.close('failed', 'it broke'); os._exit(1)", POLLS)
    assert codes == [1, -signal.SIGKILL]
    assert (status.end.outcome, status.end.ranks, status.end.text) == ("failed", [0], "it broke")
    assert capfd.readouterr().err == "", "the rank has said so itself"


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_to_die_is_named_even_if_the_watchdog_slept_through_it(tmp_path, first):
    """As on a host that is so busy that the launcher ends the others before the watchdog runs."""
    with ranks_of(tmp_path, POLLS, POLLS) as ranks:
        watchdog = watchdog_of(tmp_path, ranks)
        for rank in (ranks[first], ranks[1 - first]):
            rank.kill()
            rank.wait()
        watchdog.run()
    assert read_status(tmp_path).end.ranks == [first]


HANGS = {
    "gil": "while True: ctypes.PyDLL(None).sleep(600)",  # no thread of the rank could notice
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
}


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS)
def test_a_hung_rank_is_named_with_its_stack_whatever_holds_it(tmp_path, capfd, body):
    status, codes = watch(tmp_path, POLLS, body, hang_s=0.6)
    assert codes == [-signal.SIGKILL] * 2
    assert [(row.status.rank, row.condition) for row in status.rows] == [(1, "hung"), (0, "ended")]
    said = f"the job hangs: {status.rows[0].status.name} in phase rollout, step 4, without a sign of life for 0.6 s"
    assert said in capfd.readouterr().err
    for rank in range(2):
        text = StatusFiles(tmp_path).stacks_of(rank).read_text()
        assert "<string>" in text and text.count("====") == 1


def test_after_a_timeout_all_stacks_are_written_and_the_missing_rank_is_named(tmp_path, capfd):
    status, codes = watch(tmp_path, "heartbeat.close('timeout', 'it timed out', [1])", "time.sleep(60)")
    assert codes == [-signal.SIGKILL] * 2
    assert (status.end.outcome, status.end.ranks, status.end.text) == ("hung", [1], "it timed out")
    assert f"all ranks write their stacks to {tmp_path}/stacks" in capfd.readouterr().err
    assert "<string>" in StatusFiles(tmp_path).stacks_of(1).read_text()


def test_the_end_of_the_job_on_another_host_ends_this_hosts_ranks(tmp_path):
    with ranks_of(tmp_path, POLLS) as ranks:
        watchdog = watchdog_of(tmp_path, ranks, size=2)
        end = JobEnd("a", "killed", "rank 1 was killed", [1])
        assert StatusFiles(tmp_path).claim_end(end)
        watchdog.run()
        assert ranks[0].wait() == -signal.SIGKILL
    assert StatusFiles(tmp_path).read_end("a") == end


def watchdogs_of(run_dir, monkeypatch, hang_s=1800.0):
    """Two watchdogs of one rank each, as on two hosts, with a clock to set; signals go to no process."""
    monkeypatch.setattr(module, "_LOOK_S", 5.0)
    StatusFiles(run_dir).clear()
    now, killed = [0.0], []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((now[0], number)))
    options = [WatchdogOptions(str(run_dir), "a", 2, {rank: os.getpid()}, hang_s) for rank in range(2)]
    return now, killed, [Watchdog(of_host, lambda: now[0]) for of_host in options]


def test_the_stacks_of_a_host_that_sees_new_files_late_are_written_before_the_first_kill(tmp_path, monkeypatch):
    """A host that has asked for a file on NFS knows for 60 s that there is none."""
    now, killed, (first, late) = watchdogs_of(tmp_path, monkeypatch)
    written = {}
    for name, watchdog in (("first", first), ("late", late)):
        monkeypatch.setattr(watchdog, "_write_stacks", lambda name=name: written.setdefault(name, now[0]))
    read_end = late._files.read_end
    monkeypatch.setattr(late._files, "read_end", lambda start: read_end(start) if now[0] >= 60 else None)
    first._claim("hung", "it hangs", [1])
    while not killed:
        now[0] += 5
        late._look()
        first._look()
    assert written == {"first": 0.0, "late": 60.0}
    assert killed[0] == (75.0, signal.SIGKILL)


def test_other_hosts_files_are_looked_at_seldom(tmp_path, monkeypatch):
    """Every host looks at the files of all others: with each heartbeat these would be hundreds of requests a second."""
    now, _, (watchdog, other) = watchdogs_of(tmp_path, monkeypatch)
    other._look()
    looked, silence = [], watchdog._silence
    monkeypatch.setattr(watchdog, "_silence", lambda path, seconds: looked.append(path) or silence(path, seconds))
    for _ in range(24):
        now[0] += 5
        watchdog._look()
    assert looked.count(StatusFiles(tmp_path).rank(0)) == 24
    assert looked.count(StatusFiles(tmp_path).host(1)) == 2
    assert silence(StatusFiles(tmp_path).host(1), 0.0) == 60.0, "no second is lost from the first look on"


@pytest.mark.parametrize(
    ("outcome", "writes_on", "is_lost"),
    [("running", False, True), ("running", True, False), ("done", False, False)],
    ids=["without power", "its watchdog was killed", "its ranks are done"],
)
def test_a_host_that_writes_no_more_is_named_and_ends_the_job(tmp_path, outcome, writes_on, is_lost):
    """No kernel and no launcher reports it: the other ranks may wait for its ranks in their idle windows for ever."""
    files = StatusFiles(tmp_path)
    with ranks_of(tmp_path, "for _ in range(60): heartbeat.report(); time.sleep(0.03)\n" + DONE) as ranks:
        files.host(1).touch()
        files.write_rank(RankStatus("a", 1, 2, "n1", 7, first=1, phase="rollout", step=4, outcome=outcome))
        if writes_on:
            os.utime(files.rank(1), (time.time() + 60,) * 2)
        watchdog = watchdog_of(tmp_path, ranks, hang_s=0.6, size=2)
        ranks[0].stdin.close()
        watchdog.run()
    end = read_status(tmp_path).end
    assert (end is not None) == is_lost
    if end is not None:
        assert (end.outcome, end.ranks) == ("hung", [1])
        assert end.text.startswith("the job hangs: rank 1 (host n1, pid 7) in phase rollout, step 4, without a sign")


def test_a_suspended_job_does_not_hang(tmp_path):
    """Between two looks of the watchdog an hour goes by, in which it could not run, and neither could the ranks."""
    hours = iter(range(0, 10**9, 3600))
    status, codes = watch(tmp_path, "time.sleep(0.5); " + DONE, hang_s=60.0, clock=lambda: next(hours))
    assert (codes, status.condition) == ([0], "finished")


def test_a_death_is_found_on_a_kernel_without_pidfds(tmp_path, monkeypatch):
    def missing(pid):
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", missing)
    with ranks_of(tmp_path, POLLS) as ranks:
        watchdog = watchdog_of(tmp_path, ranks)
        ranks[0].kill()
        ranks[0].wait()
        watchdog.run()
    assert read_status(tmp_path).end.ranks == [0]

"""The pool: whatever an environment does, every turn gets a result, in time, and a lost worker changes nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.pool import EnvironmentPool, Trajectories
from megatron_tlt.envs.process import EnvWorker
from megatron_tlt.errors import ConfigError, EnvError
from megatron_tlt.types import Prompt, TurnResult
from megatron_tlt.workers.process import WorkerProcess
from megatron_tlt.workers.worker import WorkerStartError
from tests.helpers.bound import to_one_cpu
from tests.helpers.user_errors import without_place

USER = Path(__file__).parent / "user_envs.py"
PROMPTS = [Prompt(i, f"d:{i}", (1, 2), "q", seed=7 + i) for i in range(3)]


class Letters:
    """An observation's characters as tokens, after the drawn ones. "no template" has none."""

    max_characters = 999

    def given(self, observation: str, role: str, drawn: Sequence[int]) -> tuple[int, ...]:
        if observation.endswith("no template"):
            raise ConfigError.of("env.tool_role", role, "must be another one")
        return (*drawn, *map(ord, observation))


@contextmanager
def trajectories(name: str = "Act", **settings: object) -> Iterator[tuple[EnvironmentPool, Trajectories]]:
    section = EnvSection.model_validate({"path": f"{USER}:{name}", "max_turns": 9, "timeout_s": 20, **settings})
    with closing(EnvironmentPool(section)) as pool, closing(pool.trajectories(Letters())) as turns:
        yield pool, turns


def play(
    turns: Trajectories, texts: dict[int, str], turn: int, sample: int = 0, prompts: Sequence[Prompt] = PROMPTS
) -> dict[int, TurnResult]:
    """The results of one turn of some prompts."""
    for i, text in texts.items():
        turns.submit(prompts[i], sample, turn, [5, 6], text)
    results: dict[int, TurnResult] = {}
    end = time.monotonic() + 60
    while len(results) < len(texts) and time.monotonic() < end:
        results |= {r.prompt_id: r for r in turns.poll(1.0)}
    return results


def started(turns: Trajectories, prompt: int, text: str, turn: int = 0) -> int:
    """The id of the process that a turn starts."""
    return int("".join(map(chr, play(turns, {prompt: text}, turn)[prompt].given[2:])))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def have_ended(processes: Sequence[int]) -> bool:
    """Whether none is left, after up to 20 s."""
    end = time.monotonic() + 20
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def text_of(result: TurnResult) -> str:
    return "".join(map(chr, result.given[2:]))


def test_turns_of_many_trajectories_go_to_their_own_environments() -> None:
    with trajectories(workers=2) as (pool, turns):
        assert turns.poll() == []
        assert pool.openings(PROMPTS) == ["q 7", "q 8", "q 9"]
        prompts = [replace(prompt, text=f"q\n\nq {prompt.seed}", row_text="q") for prompt in PROMPTS]
        assert text_of(play(turns, {0: "a", 1: "b", 2: "c"}, 0, prompts=prompts)[1]) == "q 8 b"
        second = play(turns, {0: "d", 1: "end"}, 1)
        assert second[0] == TurnResult(0, 0, (5, 6, *map(ord, "q 7 a d")), reward=3.0)
        assert second[1] == TurnResult(1, 0, (), reward=3.0, ended="env")
        turns.discard(0, 0)
        turns.discard(0, 0)
        assert text_of(play(turns, {0: "e"}, 0)[0]) == "q 7 e", "begun anew"
        assert {w.load for w in pool.workers} == {1}
    with trajectories(max_turns=2) as (_, turns):
        play(turns, {0: "a", 1: "a"}, 0)
        second = play(turns, {0: "b", 1: "truncated"}, 1)
        assert (second[0].ended, second[1].ended) == ("max_turns", "cut")


@pytest.mark.parametrize("row", ["q", ""])
def test_a_trajectory_whose_reset_is_not_that_of_its_prompt_fails(row: str) -> None:
    prompts = [replace(prompt, text=row) for prompt in PROMPTS]
    for name, longest, failure in (
        ("Counts", None, "the prompt has the opening '0', reset now returned '3'"),
        ("Act", 2, None),
    ):
        with closing(EnvironmentPool(EnvSection(path=f"{USER}:{name}"), longest_opening=longest)) as pool:
            texts = pool.openings(prompts)
            whole = [replace(p, text=f"{row}\n\n{t}" if row else str(t), row_text=row) for p, t in zip(prompts, texts)]
            result = play(pool.trajectories(Letters()), {0: "a"}, 0, prompts=whole)[0]
            assert result.failure is None if failure is None else str(result.failure).endswith(failure)


def test_workers_of_a_bound_rank_run_on_the_cpus_that_they_are_given() -> None:
    section = EnvSection(path=f"{USER}:Act", max_turns=9)
    with to_one_cpu() as cpus, closing(EnvironmentPool(section, cpus=cpus)) as pool:
        assert text_of(play(pool.trajectories(Letters()), {0: "cpus"}, 0)[0]) == str(len(cpus))


def test_every_kind_of_failure_ends_its_trajectory_only() -> None:
    with trajectories(timeout_s=3) as (_, turns):
        play(turns, {0: "a", 1: "b", 2: "c"}, 0)
        raised = play(turns, {0: "raise"}, 1)[0]
        assert raised == TurnResult(0, 0, (), failure=raised.failure)
        assert without_place(raised.failure, ".*user_envs") == "RuntimeError: no such luck"
        assert text_of(play(turns, {1: "still there"}, 1)[1]) == "q 8 b still there"
        start = time.monotonic()
        hung = play(turns, {1: "hang"}, 2)[1]
        assert hung.failure == "no answer within 3 s"
        assert 3 <= hung.seconds <= time.monotonic() - start < 30
        assert text_of(play(turns, {2: "d"}, 1)[2]) == "q 9 c d", "played again in a new worker"
        assert play(turns, {2: "die"}, 2)[2].failure == "worker ended with exit code 3"
        assert text_of(play(turns, {0: "x"}, 0, sample=1)[0]) == "q 7 x"
        failure = "its observation cannot be a message of the user: env.tool_role = 'user': must be another one"
        assert play(turns, {0: "no template"}, 1, sample=1)[0].failure == failure
        assert text_of(play(turns, {0: "y"}, 0, sample=1)[0]) == "q 7 y", "begun anew"


def test_a_worker_that_dies_between_turns_costs_nothing_unless_its_environment_answers_otherwise() -> None:
    with trajectories() as (_, turns):
        process = int(text_of(play(turns, {0: "pid"}, 0)[0]))
        play(turns, {1: "a"}, 0)
        os.kill(process, signal.SIGKILL)
        results = play(turns, {0: "b", 1: "b"}, 1)
        assert text_of(results[1]) == "q 8 a b"
        assert "is not a function of prompt, seed and turns" in str(results[0].failure)


def test_a_worker_that_takes_anothers_place_has_its_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER.read_text())
    with trajectories(path=f"{file}:Act", workers=2) as (_, turns):
        play(turns, {0: "a", 1: "a", 2: "a"}, 0)
        file.write_text("# an edit in mid-run\n" + USER.read_text())
        play(turns, {0: "die"}, 1)
        failure = f"a worker did not start: {file} has changed since the run's start"
        assert str(play(turns, {2: "b"}, 1)[2].failure).startswith(failure)
        others = play(turns, {0: "a", 1: "a", 2: "a"}, 0, sample=1)
        assert [result.failure for result in others.values()] == [None] * 3, "new ones go to a worker that runs"


@pytest.mark.parametrize(
    ("name", "turn"), [("Keeps", "once"), ("KeepingTools", '<tool_call>{"name": "keep"}</tool_call>')]
)
def test_a_worker_whose_memory_stays_taken_is_replaced_at_no_cost(name: str, turn: str) -> None:
    with trajectories(name, worker_memory_mib=2048) as (pool, turns):
        assert len({*pool.openings(PROMPTS)}) == 1
        results = play(turns, dict.fromkeys(range(3), turn), 0)
        assert [text_of(result) for result in results.values()] == ["kept"] * 3
        assert pool.workers[0].starts > 1


def test_a_trajectory_without_end_of_memory_costs_two_workers_and_fails() -> None:
    with trajectories("Keeps", worker_memory_mib=2048) as (pool, turns):
        failure = "worker had no memory left (worker_memory_mib) and was replaced"
        assert play(turns, {0: "all"}, 0)[0].failure == failure
        assert pool.workers[0].starts == 2


def test_an_environment_that_cannot_be_loaded_fails_every_turn() -> None:
    with trajectories("Missing") as (pool, turns):
        assert "has no 'Missing'" in str(play(turns, {0: "a"}, 0)[0].failure)
        with pytest.raises(EnvError, match="no opening for prompt 'd:0': a worker did not start"):
            pool.openings(PROMPTS)


def test_slow_resets_are_waited_for_with_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_tlt.workers.worker._BEAT_S", 0.05)
    beats: list[float] = []
    section = EnvSection(path=f"{USER}:Slow", timeout_s=20)
    with closing(EnvironmentPool(section, lambda: beats.append(time.monotonic()))) as pool:
        pool.openings(PROMPTS[:1])
        beats.clear()
        assert pool.openings(PROMPTS[:2]) == ["slow", "slow"]
    assert len(beats) >= 6


def test_an_environment_that_raised_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "closed"
    with trajectories("Closing", params={"path": str(file)}) as (_, turns):
        assert without_place(play(turns, {0: "a"}, 0)[0].failure) == r"RuntimeError: a\ud800"
        play(turns, {1: "b"}, 0)
    assert file.read_text().startswith("closed ")


def test_an_opening_is_asked_for_twice_and_what_fails_to_close_is_logged_once_a_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trajectories("BadClose", params={"path": str(tmp_path / "resets")}, timeout_s=2) as (pool, turns):
        assert pool.openings(PROMPTS[:1]) == ["now"]
        ended = play(turns, {0: "raise", 1: "raise", 2: "hang"}, 0)
        assert {result.ended for result in ended.values()} == {"env"}
        play(turns, {0: "fine"}, 0, sample=1)  # behind the others' ends
        starts = pool.workers[0].starts
    assert (without_place(caplog.messages[0]), len(caplog.messages), starts) == (
        "close() of 3 environments failed; one of them: RuntimeError: it is stuck", 1, 2
    )  # fmt: skip


def test_a_worker_that_cannot_be_forked_once_runs_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = WorkerProcess.start, [OSError(errno.EAGAIN, "no processes are left")]

    def start_in_the_end(process: WorkerProcess) -> None:
        if left:
            raise left.pop()
        start(process)

    monkeypatch.setattr(WorkerProcess, "start", start_in_the_end)
    with trajectories() as (pool, turns):
        failure = f"a worker did not start: [Errno {errno.EAGAIN}] no processes are left"
        assert play(turns, {0: "a"}, 0)[0].failure == failure and pool.workers[0].has_failed
        assert text_of(play(turns, {0: "a"}, 0, sample=1)[0]) == "q 7 a" and not pool.workers[0].has_failed


def test_a_worker_that_starts_while_the_pool_closes_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = EnvWorker(EnvSection(path=f"{USER}:Act"))
    start, started = WorkerProcess.start, []

    def start_and_close(process: WorkerProcess) -> None:
        start(process)
        started.append(process)
        worker._is_closed = True

    monkeypatch.setattr(WorkerProcess, "start", start_and_close)
    with pytest.raises(WorkerStartError, match="are closed"):
        worker.do(worker.ensure_running).result()
    worker.close()
    assert len(started) == 1 and not started[0].is_alive()


def test_closing_ends_a_hung_worker_at_once() -> None:
    start = time.monotonic()
    with trajectories(timeout_s=500) as (_, turns):
        turns.submit(PROMPTS[0], 0, 0, [5], "hang")
        time.sleep(0.5)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("turn", ["KeyboardInterrupt", "GeneratorExit", r"SystemExit: a\x1b[31m\rb / c"])
def test_what_ends_a_program_ends_its_trajectory_only(turn: str) -> None:
    with trajectories("Processes") as (_, turns):
        before = started(turns, 1, "pid")
        assert without_place(play(turns, {0: turn.partition(":")[0]}, 0)[0].failure) == turn
        assert started(turns, 1, "pid", 1) == before


def test_a_fork_of_an_environment_does_not_answer_for_it() -> None:
    with trajectories("Processes") as (_, turns):
        worker = started(turns, 1, "pid")
        assert text_of(play(turns, {0: "fork"}, 0)[0]) == "parent"
        assert [started(turns, 1, "pid", turn) for turn in (1, 2)] == [worker] * 2


def test_a_process_in_a_session_of_its_own_ends_with_its_trajectory() -> None:
    with trajectories("Processes") as (_, turns):
        processes = [started(turns, 0, "session"), started(turns, 1, "orphan"), started(turns, 2, "same session")]
        turns.discard(0, 0)
        started(turns, 2, "pid", 1)
        assert [*map(is_alive, processes)] == [False, True, True]
        turns.discard(1, 0)
        turns.discard(2, 0)
        started(turns, 0, "pid")
        assert [*map(is_alive, processes)] == [False, False, True], "a pool that trajectories share lives on"
    assert not is_alive(processes[2])


def test_whatever_ends_a_worker_ends_the_processes_below_it() -> None:
    with trajectories("Processes") as (_, turns):
        processes = [started(turns, 0, "session"), started(turns, 1, "orphan"), started(turns, 2, "pid")]
        os.kill(processes[2], signal.SIGKILL)
        assert have_ended(processes)


def test_a_killed_rank_leaves_no_process(tmp_path: Path) -> None:
    """Nor a worker in the middle of a turn that does not end."""
    program = f"""
import os, sys, time
sys.path[:0] = {[str(USER.parents[3])]!r}
from tests.unit.envs.test_pool import PROMPTS, started, trajectories
with trajectories("Processes") as (_, turns):
    print(started(turns, 0, "session"), started(turns, 1, "orphan"), started(turns, 2, "pid"), flush=True)
    turns.submit(PROMPTS[2], 0, 1, [5, 6], "spin")
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
"""
    with (tmp_path / "said").open("w") as said:  # no pipe, which what is left would hold open
        subprocess.run([sys.executable, "-c", program], stdout=said, check=False)
    processes = [*map(int, (tmp_path / "said").read_text().split())]
    assert len(processes) == 3
    assert have_ended(processes)

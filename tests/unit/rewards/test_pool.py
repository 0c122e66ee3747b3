"""The pool: whatever a reward does, every sample gets a result, in order, in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.errors import RewardError
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.types import Prompt, RewardResult, Sample, SampleGroup
from tests.helpers.user_errors import without_place
from tests.unit.envs.test_pool import have_ended

USER = Path(__file__).parent / "user_rewards.py"


def groups_of(*responses: list[str]) -> list[SampleGroup]:
    return [
        SampleGroup(
            Prompt(i, f"d:{i}", (1, 2), "q", "7"),
            [Sample(i, k, [5], [-0.1], text, "stop", 0) for k, text in enumerate(texts)],
        )
        for i, texts in enumerate(responses)
    ]


def results(pool: RewardPool, *responses: list[str]) -> list[RewardResult]:
    groups = groups_of(*responses)
    pool.score(groups)
    assert [len(g.rewards) for g in groups] == [len(texts) for texts in responses]
    assert all(s.token_ids == [5] and s.logprobs == [-0.1] for g in groups for s in g.samples)
    return [r for g in groups for r in g.rewards]


@contextmanager
def pool_of(name: str = "act", on_wait: Callable[[], None] = lambda: None, **settings: Any) -> Iterator[RewardPool]:
    """Of one worker with one function, which has a second; a failure counts -1."""
    function = RewardConfig(name="python", path=f"{USER}:{name}")
    section = {"workers": 1, "timeout_s": 1.0, "failure_value": -1.0} | settings
    with closing(RewardPool(RewardSection(functions=(function,), **section), on_wait)) as pool:
        yield pool


@pytest.mark.parametrize("workers", [1, 3])
def test_values_come_back_in_order(workers: int) -> None:
    texts = [[str(i * 10 + k) for k in range(4)] for i in range(40)]
    with pool_of(workers=workers) as pool:
        assert [r.value for r in results(pool, *texts)] == [float(t) for group in texts for t in group]
        assert results(pool) == []
        assert results(pool, []) == []


def test_a_slow_reward_is_waited_for_with_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_tlt.workers.worker._BEAT_S", 0.05)
    beats: list[None] = []
    with pool_of(on_wait=lambda: beats.append(None)) as pool:
        assert results(pool, ["hang"])[0].failure == "no result of act within 1 s (rewards.timeout_s)"
    assert len(beats) >= 6


def test_every_kind_of_failure_costs_one_sample() -> None:
    with pool_of(workers=2) as pool:
        texts = ["1", "raise", "hang", "2", "die", "quit", "3", "exit", "nan", "spin", "4", "crash", "interrupt"]
        found = dict(zip(texts, results(pool, texts[:5], texts[5:])))
        assert results(pool, ["1"])[0].value == 1.0, "also after the last sample has killed the worker"
        failures = pool.score(groups_of(["1", "raise"]))
        assert failures is not None and failures.startswith("1 of 2 rewards failed; one of them: act: ")
        assert pool.score(groups_of(["1"])) is None
    assert [found[t].value for t in "1234"] == [1.0, 2.0, 3.0, 4.0]
    assert all(found[t].failure is None for t in "1234")
    raised = {t: without_place(found.pop(t).failure) for t in ("raise", "exit", "interrupt")}
    assert raised == {
        "raise": "act: RuntimeError: no such luck",
        "exit": "act: SystemExit: 3",
        "interrupt": "KeyboardInterrupt",
    }
    assert {t: r.failure for t, r in found.items() if r.failure} == {
        "nan": "act: ValueError: returned nan: must be finite",
        "hang": "no result of act within 1 s (rewards.timeout_s)",
        "spin": "no result of act within 1 s (rewards.timeout_s)",
        "die": "worker was ended by signal 9",
        "quit": "worker ended with exit code 7",
        "crash": "worker was ended by signal 11",
    }
    assert all(r.value == -1.0 and not r.correct for r in found.values() if r.failure)


@pytest.mark.parametrize(("texts", "is_praised"), [(["-1", "-1", "raise"], True), (["1", "-1", "raise"], False)])
def test_a_failure_that_is_reinforced_is_named(texts: list[str], is_praised: bool) -> None:
    with pool_of(failure_value=0.0) as pool:
        warning = str(pool.score(groups_of(texts)))
    praised = "1 of 3 rewards failed, each as rewards.failure_value = 0, above its group's mean: such responses are"
    assert warning.startswith(praised) is is_praised and "; one of them: act: RuntimeError" in warning


def test_a_failure_of_an_environment_is_no_failure_of_a_function() -> None:
    (group,) = groups_of(["-1", "2"])
    group.samples[1].failure = "no answer within 30 s"
    with pool_of() as pool:
        assert pool.score([group]) is None
    assert [r.failure for r in group.rewards] == [None, "env: no answer within 30 s"]


def test_ten_gigabytes_cost_one_sample_and_no_memory() -> None:
    with pool_of("hungry", timeout_s=30.0) as pool:
        found = results(pool, ["0", "10", "1"])
    assert without_place(found[1].failure) == "hungry: MemoryError"
    # 1000: should memory run out all the same, Linux ends this process before any rank.
    assert [r.value for r in found] == [1000.0, -1.0, 1000.0]


def test_a_worker_whose_memory_stays_taken_is_replaced() -> None:
    with pool_of("keeps", timeout_s=30.0, worker_memory_mib=2048) as pool:
        found = results(pool, ["700", "9999", "700", "700", "700"])
    assert [r.value for r in found] == [1.0, -1.0, 2.0, 1.0, 2.0], "the one that has room for others lives on"
    assert without_place(found[1].failure) == "keeps: MemoryError"


def test_a_sample_that_leaves_no_memory_costs_two_workers_and_fails() -> None:
    with pool_of("keeps", timeout_s=30.0, worker_memory_mib=2048) as pool:
        found = results(pool, ["all", "700"])
        assert pool._workers[0].starts == 3
    assert found[0].failure == "worker had no memory left (worker_memory_mib) and was replaced"
    assert [r.value for r in found] == [-1.0, 1.0]


def test_a_function_may_start_processes_in_every_way_of_python() -> None:
    with pool_of(timeout_s=60.0) as pool:
        found = results(pool, ["pid", "pool", "terminate", "fork", "pid"])
    assert [r.failure for r in found] == [None] * 5
    assert [r.value for r in found] == [found[0].value, 36.0, -signal.SIGTERM, 3.0, found[0].value]


def test_a_process_in_a_session_of_its_own_ends_with_its_call() -> None:
    with pool_of() as pool:
        started, worker = results(pool, ["session", "pid"])
        assert have_ended([int(started.value)]) and results(pool, ["pid"])[0] == worker


def test_workers_live_on_between_calls_and_a_dead_idle_one_is_replaced_at_no_cost() -> None:
    with pool_of() as pool:
        first, again = results(pool, ["pid"])[0].value, results(pool, ["pid"])[0].value
        assert first == again != os.getpid()
        os.kill(int(first), signal.SIGKILL)
        third = results(pool, ["pid"])[0]
        assert third.failure is None
        assert third.value != first


def test_workers_know_nothing_of_mpi_or_torch_and_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with pool_of() as pool:
        assert [r.value for r in results(pool, ["launcher", "torch", "tasks"])] == [0.0, 0.0, 1.0]


def test_what_a_function_has_started_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHILD_PIDS", str(tmp_path / "pids"))
    with pool_of() as pool:
        assert results(pool, ["children"])[0].failure == "no result of act within 1 s (rewards.timeout_s)"
        children = [*map(int, (tmp_path / "pids").read_text().split())]
        assert len(children) == 2 and have_ended(children)


EDITED = """
import os
from a_helper_of_rewards import VALUE
def value(prompt, answer, response, metadata):
    return os._exit(1) if response == "die" else VALUE
"""


def test_a_worker_that_takes_anothers_place_has_its_code_or_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EDITED)
    helper, other = tmp_path / "a_helper_of_rewards.py", tmp_path / "other.py"
    helper.write_text("VALUE = 1.0")
    section = RewardSection(functions=(RewardConfig(name="python", path=f"{tmp_path}/mine.py:value"),))
    with closing(RewardPool(section)) as pool:
        assert [r.value for r in results(pool, ["1"])] == [1.0]
        other.write_text("an edit of what is not imported")
        assert [r.value for r in results(pool, ["die", "1"])] == [0.0, 1.0]
        helper.write_text("VALUE = 2.0")
        with pytest.raises(RewardError, match=f"a worker did not start: {helper} has changed since the run's start"):
            results(pool, ["1", "die", "1"])


def test_a_pool_that_is_closed_while_its_workers_start_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with pool_of(workers=2) as pool:
            pool.warm_up()
    time.sleep(0.5)
    assert capfd.readouterr().err == ""
    assert not multiprocessing.active_children()

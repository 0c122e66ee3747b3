"""What replicas keep of pre-rolled responses from window to window."""

from types import SimpleNamespace

import pytest

from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import BackendError, EnvError
from megatron_tlt.trainer.pre_rollouts import PreRoller
from megatron_tlt.types import EngineStats, Prompt, Sample


def part() -> PreRoller:
    queues = SimpleNamespace(num_replicas=1, world=SingleProcess(), open_shared=lambda: None)
    unused = dict.fromkeys(("stream", "backend", "params"))
    return PreRoller(**unused, queues=queues, num_samples=1, num_prompts=1, last_step=9, max_bytes=1000)  # type: ignore[arg-type]


def exchange(part: PreRoller, tokens: list[int], reason: str) -> None:
    part.open(1)
    part._new = [Sample(0, 0, tokens, [], "", reason, 0)]  # type: ignore[arg-type]
    part.exchange()


def test_an_unfinished_response_is_continued_also_in_place_of_a_shorter_whole_one():
    """The policy has changed between the windows: what was a whole response is the beginning of another."""
    kept, prompt = part(), Prompt(0, "q0", (1,), "q")
    exchange(kept, [1, 2, 3], "abort")
    assert not kept._is_whole(prompt)
    exchange(kept, [1, 2], "abort")
    assert kept._drafts[0, 0].tolist() == [1, 2, 3], "the longer one"
    exchange(kept, [1, 2], "stop")
    assert kept._is_whole(prompt) and kept._drafts[0, 0].tolist() == [1, 2]
    exchange(kept, [1, 4, 5, 6], "abort")
    assert not kept._is_whole(prompt) and kept._drafts[0, 0].tolist() == [1, 4, 5, 6]
    assert kept._drafts[0, 0].base is None, "not a view of all that was exchanged"
    assert kept.take([prompt]).keys() == {(0, 0)} and not kept._drafts


class BesideAnIdleRank(SingleProcess):
    """Rank 0 of two; the other one has pre-rolled nothing."""

    size = 2

    def all_gather_object(self, value):
        return [value, {name: column[:0] for name, column in value.items()} if isinstance(value, dict) else False]


@pytest.mark.parametrize("size", [1, 2])
def test_all_the_room_is_for_the_longest_responses_and_what_it_lacks_for_is_named_once(size: int, caplog):
    kept = part()
    kept.queues.world = BesideAnIdleRank() if size == 2 else SingleProcess()  # type: ignore[misc]
    kept._new = [Sample(0, i, [i] * tokens, [], "", "stop", 0) for i, tokens in enumerate((10, 150, 90))]
    kept.open(1)
    assert kept.exchange() == 0 and sorted(map(len, kept._drafts.values())) == [10, 90, 150], "1000 bytes of tokens"
    assert not caplog.text
    for _ in range(2):
        kept._new = [Sample(1, i, [i] * tokens, [], "", "stop", 0) for i, tokens in enumerate((10, 150, 91))]
        kept._drafts.clear()
        assert kept.exchange() == 10 and sorted(map(len, kept._drafts.values())) == [91, 150]
    assert caplog.text.count("no room for 10 tokens") == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failure_drops_the_window_of_a_replica_of_one_rank_and_ends_one_of_several(tp: int, caplog):
    """The other ranks of a replica wait in the middle of a step, for one that would never come back to it."""
    of, empty = part(), EngineStats()
    of.queues.tp, of.queues.is_first = tp, True  # type: ignore[misc]
    of.backend = SimpleNamespace(take_stats=lambda: empty)  # type: ignore[assignment]
    of.stream = SimpleNamespace(peek=lambda count: 1 / 0)  # type: ignore[assignment]

    def run() -> int:
        return of._run(lambda prompts: None, lambda: False)  # type: ignore[arg-type, return-value]

    if tp == 2:
        with pytest.raises(ZeroDivisionError):
            run()
        return
    assert run() == run() == 0

    def dead() -> EngineStats:
        raise BackendError("its process is gone")

    of._has_failed, of.backend = False, SimpleNamespace(take_stats=dead)  # type: ignore[assignment]
    caplog.clear()
    assert run() == 0
    assert [r.getMessage().count("pre-rolls no more") for r in caplog.records] == [1]


def test_texts_of_environments_are_asked_for_before_the_rollout_and_a_failure_costs_drafts_only(
    caplog: pytest.LogCaptureFixture,
):
    ahead, asked, broken = part(), [], False

    def peek(count: int) -> list[Prompt]:
        asked.append(count)
        if broken:
            raise EnvError("no opening for prompt 'q7'")
        return [Prompt(i, f"q{i}", (1,), "q") for i in range(count)]

    ahead.stream = SimpleNamespace(has_openings=True, peek=peek)  # type: ignore[assignment]
    ahead.backend = SimpleNamespace(ordered=list)  # type: ignore[assignment]
    for step, count in ((6, 2), (8, 1), (9, 0)):
        ahead.look_ahead(step)
        ahead.open(step)
        assert [prompt.prompt_id for prompt in ahead._next_prompts()] == list(range(count))
    broken = True
    ahead.look_ahead(7)
    ahead.open(7)
    assert ahead._next_prompts() == [] and "q7" in caplog.text
    assert asked == [2, 1, 0, 2], "no rank asks in its window"
    ahead._ahead, ahead.stream.has_openings = None, False  # type: ignore[misc]
    assert ahead._next_prompts() == [] and asked[4:] == [2]

"""The cache of one rank, over an engine that draws by key: files, the writer, reuse, staleness, removal."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.run import RolloutCacheSection
from megatron_tlt.data.prompt_queue import PromptQueue
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.observe.reduction import values_of
from megatron_tlt.resilience import rollout_cache
from megatron_tlt.resilience.response_lines import decode_sample, whole_bodies
from megatron_tlt.resilience.rollout_cache import (
    ResponseWriter,
    RolloutCache,
    encode_line,
    encode_response,
    prompt_crc,
    scan_responses,
)
from megatron_tlt.types import GenerateCall, Prompt, Sample, SamplingParams
from tests.helpers.tiny_models import row_key

PARAMS, SAMPLES = SamplingParams(seed=3), 4
KEY = {"weights": "abc", "stop": ["x"], "temperature": 1.0}
PROMPTS = [Prompt(i, f"q{i}", (1, 2, i), "?") for i in range(4)]
CRCS = {p.prompt_id: prompt_crc(p) for p in PROMPTS}
ALL = {(p, i) for p in range(4) for i in range(SAMPLES)}


def response(prompt_id: int, index: int, length: int) -> Sample:
    """Log-probs as the engine has them: float32 numbers."""
    rng = np.random.default_rng((prompt_id, index))
    logprobs = (-rng.random(length)).astype(np.float32).tolist()
    tokens = rng.integers(0, 2**31 - 1, length).tolist()
    text, reason = "ab\u00e9\U0001f600\udcff\n", ("stop", "length")[index % 2]
    given = ((1, 3), (9, 10)) if length > 10 else ()
    rewards = [0.1, 0.0, -1 / 3] if given else []
    earlier = ((5, 20), (6, 12)) if given else ()
    return Sample(
        prompt_id, index, tokens, logprobs, text, reason, 7, given=given, turn_rewards=rewards, earlier=earlier
    )


BEGUN = Sample(0, 2, [5, 6], [-0.5, -0.25], "", "carry", 3, earlier=((2, 1),))
RESPONSES = [response(p, i, length) for p, i, length in ((0, 0, 3), (0, 5, 1), (2, 1, 40), (3, 0, 2))]
EXPECTED = {(s.prompt_id, s.sample_index): s for s in RESPONSES}
CONTENT = encode_line(KEY) + b"".join(encode_response(s, CRCS[s.prompt_id]) for s in RESPONSES)


# -- files --------------------------------------------------------------------------------------------------


def read(path: Path, data: bytes, crcs: dict[int, int] = CRCS) -> dict[tuple[int, int], Sample] | None:
    path.write_bytes(data)
    if (found := scan_responses(path, KEY)) is None:
        return None
    return {stored.at: stored.read() for stored in found if stored.prompt_crc == crcs.get(stored.at[0])}


def test_responses_of_the_same_key_and_prompts_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert read(path, CONTENT) == EXPECTED
    assert read(path, CONTENT, {2: CRCS[2]}) == {(2, 1): EXPECTED[2, 1]}
    changes = ({}, {"seed": 1}, {"answer": "1"}, {"text": "!"}, {"task": "t"}, {"metadata": {"a": [1, b"2"]}})
    for has_env, count in ((False, 3), (True, 6)):
        assert len({prompt_crc(replace(PROMPTS[0], **changed), has_env) for changed in changes}) == count
    assert prompt_crc(PROMPTS[0]) == 1383785797, "carried responses of checkpoints have it"
    other = {**CRCS, 0: prompt_crc(Prompt(0, "q0", (9, 9), "?"))}
    assert set(read(path, CONTENT, other) or {}) == {(2, 1), (3, 0)}
    assert scan_responses(path, {**KEY, "weights": "abd"}) is None
    assert scan_responses(path, {**KEY, "more": 1}) is None


def test_a_torn_or_altered_file_gives_the_responses_before_the_damage(tmp_path: Path) -> None:
    seen = set()
    for place in range(len(CONTENT)):
        altered = bytearray(CONTENT)
        altered[place] ^= 1 << place % 8
        for data in (CONTENT[:place], bytes(altered)):
            found = read(tmp_path / "a", data) or {}
            assert found.items() <= EXPECTED.items() and len(found) < len(EXPECTED), place
            seen.add(len(found))
    assert seen == {0, 1, 2, 3}


# -- the writer ---------------------------------------------------------------------------------------------


def test_a_line_is_written_without_a_copy_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    values = asdict(BEGUN)
    del values["routed_experts"]
    expected = encode_line({"prompt_crc": 7, "sample": values})
    monkeypatch.setattr("copy.deepcopy", lambda *_: pytest.fail("copied"))
    assert encode_response(BEGUN, 7) == expected


def test_the_writer_writes_privately_and_in_order(tmp_path: Path) -> None:
    writer, path = ResponseWriter(1 << 20), tmp_path / "cache/step-000001/replica.jsonl"
    writer.begin(path, KEY)
    for sample in RESPONSES:
        writer.add(sample, CRCS[sample.prompt_id])
    assert path.read_bytes() == CONTENT, "before the step ends"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)}
    assert modes == {"replica.jsonl": 0o600, "step-000001": 0o700, "cache": 0o700}
    writer.begin(path.with_name("other.jsonl"), KEY)  # a step without a response makes no file
    writer.end()
    assert [file.name for file in path.parent.iterdir()] == ["replica.jsonl"]


def test_responses_beyond_the_limit_are_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, path = ResponseWriter(len(CONTENT) - 1), tmp_path / "cache/step-000001/replica.jsonl"
    last = encode_response(RESPONSES[-1], CRCS[RESPONSES[-1].prompt_id])
    writer.begin(path, KEY)
    for sample in (*RESPONSES, RESPONSES[-1]):
        writer.add(sample, CRCS[sample.prompt_id])
    assert path.read_bytes() == CONTENT[: -len(last)]
    assert len(caplog.records) == 1 and "a restart generates the responses beyond them again" in caplog.text


def test_a_failed_environment_is_tried_again(tmp_path: Path) -> None:
    writer = ResponseWriter(1 << 20)
    writer.begin(tmp_path / "step/replica.jsonl", KEY)
    writer.add(replace(RESPONSES[0], failure="timeout"), 0)
    assert not (tmp_path / "step").exists()


# -- the cache ----------------------------------------------------------------------------------------------


WORLD = SingleProcess()


class Engine:
    """Responses are a function of the keys; `asked` is what had to be generated."""

    capabilities = CAPABILITIES["embedded"]

    def __init__(self, dies_after: int | None = None):
        self.asked: set[tuple[int, int]] = set()
        self._dies_after = dies_after

    def generate(self, call: GenerateCall) -> list[Sample]:
        made = []
        for prompt, index in ((p, i) for p in call.prompts for i in range(call.num_samples)):
            if (prompt.prompt_id, index) in call.have:
                continue
            if len(made) == self._dies_after:
                raise KeyboardInterrupt
            tokens = [row_key(call.params.seed, prompt.prompt_id, index, t) % 1000 for t in range(3)]
            made.append(Sample(prompt.prompt_id, index, tokens, [-0.5] * 3, "t", "stop", 4))
            if (start := call.begun.get((prompt.prompt_id, index))) is not None:
                made[-1].token_ids = start.token_ids + tokens
                made[-1].logprobs, made[-1].earlier = start.logprobs + [-0.5] * 3, start.drawn_by
            call.on_response(made[-1])
        self.asked = {(s.prompt_id, s.sample_index) for s in made}
        return made


def make(run_dir: Path, engine: Engine, seed: int = 3, fresh: bool = False, world: Any = WORLD) -> RolloutCache:
    parts: Any = (run_dir / "rollout_cache", world, engine)
    return RolloutCache(RolloutCacheSection(), *parts, identity={"seed": seed}, tp=1, fresh=fresh)


def run_step(
    run_dir: Path,
    engine: Engine,
    *,
    weight: float = 1.0,
    step: int = 1,
    prompts: list[Prompt] = PROMPTS,
    on_response: Callable[[Sample], None] | None = None,
    begun: dict[tuple[int, int], Sample] | None = None,
    have: Collection[tuple[int, int]] = (),
    turns: Any = None,
    **options: Any,
) -> tuple[list[Sample], dict[str, float]]:
    """One process: starts after step - 1 steps, weight syncs weights, responses, is ended."""
    cache = make(run_dir, engine, **options)
    cache.start(step - 1)
    cache.begin_step(step, 0, str(weight))
    try:
        queue = PromptQueue(prompts, 0, 1, len(prompts), lambda: 0)
        call = GenerateCall(queue, PARAMS, SAMPLES, on_response=on_response, begun=begun or {}, have=have, turns=turns)
        samples = cache.generate(call)
    finally:
        metrics = values_of([cache.end_step()])
        cache.close()
    return samples, metrics


def killed(run_dir: Path, after: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_step(run_dir, Engine(after), **options)


def test_responses_of_an_interrupted_step_are_reused_and_only_the_rest_is_generated(tmp_path: Path) -> None:
    whole, _ = run_step(tmp_path / "whole", Engine())
    killed(tmp_path, 5)
    engine, seen = Engine(), []
    samples, metrics = run_step(tmp_path, engine, on_response=seen.append)
    assert samples == whole
    assert len(seen) == len(whole), "progress counts reused responses, too"
    assert len(engine.asked) == len(ALL) - 5
    assert metrics == {"rollout_cache/reused": 5.0, "rollout_cache/disabled": 0.0}
    again = Engine()
    assert run_step(tmp_path, again)[0] == whole
    assert again.asked == set()  # of two starts together


def test_responses_to_prompts_that_another_replica_fetches_are_left_to_it_undecoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large job has more responses, and experts of their tokens, than a rank has room for."""
    decoded: list[Sample] = []

    def decode(fields: dict[str, Any]) -> Sample:
        decoded.append(decode_sample(fields))
        return decoded[-1]

    monkeypatch.setattr(rollout_cache, "decode_sample", decode)
    killed(tmp_path, 5)  # four responses to prompt 0, one to prompt 1
    engine = Engine()
    cache = make(tmp_path, engine)
    cache.start(0)
    cache.begin_step(1, 0, "1.0")
    tickets = iter((1, 3, 4))
    queue = PromptQueue(PROMPTS, 0, 2, 0, lambda: next(tickets))
    samples = cache.generate(GenerateCall(queue, PARAMS, SAMPLES))
    assert [(s.prompt_id, s.sample_index) for s in samples] == [(p, i) for p in (1, 3) for i in range(SAMPLES)]
    assert len(engine.asked) == 7
    assert cache.end_step()["rollout_cache/reused"].value == 1.0
    assert {sample.prompt_id for sample in decoded} == {1}


class OneOfTwo(SingleProcess):
    """Rank `rank` of two; what comes from the other one is as its own, its responses are none."""

    size = 2

    def __init__(self, rank: int):
        self.rank, self.is_main = rank, rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if source == self.rank else []


def test_the_files_of_earlier_starts_are_parsed_once_a_step_each_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of long responses are gigabytes, and dynamic sampling generates several times a step."""
    killed(tmp_path, 5)
    killed(tmp_path, 2)
    files = sorted(str(path) for path in tmp_path.rglob("replica-*.jsonl"))
    parsed: list[str] = []

    def bodies(file: Any) -> Iterator[tuple[int, bytes]]:
        parsed.append(file.name)
        return whole_bodies(file)

    monkeypatch.setattr(rollout_cache, "whole_bodies", bodies)
    found, by_rank = [], []
    for world in (WORLD, OneOfTwo(0), OneOfTwo(1)):
        parsed.clear()
        cache = make(tmp_path, Engine(), world=world)
        cache.start(0)
        cache.begin_step(1, 0, "1.0")
        for prompts in (PROMPTS[:1], PROMPTS):  # two rounds of one step
            call = GenerateCall(PromptQueue(prompts, 0, 1, len(prompts), lambda: 0), PARAMS, SAMPLES)
            found.append(set(cache.find(call)))
        by_rank.append(sorted(parsed))
        cache.close()
    assert by_rank == [files, files[:1], files[1:]]
    assert len(found[0]) == 4 and len(found[1]) == 7
    assert found[3] | found[5] == found[1] and not found[3] & found[5]


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 1.5},
        {"seed": 4},
        {"step": 2},
        {"prompts": [Prompt(i, "o", (5, i), "?") for i in range(4)]},
        {"prompts": [replace(p, metadata={"level": 2}) for p in PROMPTS], "turns": object()},
        {"fresh": True},
    ],
)
def test_responses_of_anything_else_are_not_used(tmp_path: Path, change: dict[str, Any]) -> None:
    turns = change.get("turns")
    killed(tmp_path, 5, turns=turns)
    engine = Engine()
    _, metrics = run_step(tmp_path, engine, **change)
    assert engine.asked == ALL
    assert metrics["rollout_cache/reused"] == 0.0


@pytest.mark.parametrize(
    ("begun", "is_reused"),
    [
        (BEGUN, True),
        (None, False),
        (replace(BEGUN, token_ids=[5, 9]), False),
        (replace(BEGUN, logprobs=[-0.5, -0.3]), False),
        (replace(BEGUN, policy_version=2), False),
        (replace(BEGUN, earlier=()), False),
    ],
)
def test_a_cached_response_continues_the_very_one_that_is_carried(
    tmp_path: Path, begun: Sample | None, is_reused: bool
) -> None:
    killed(tmp_path, 5, begun={(0, 2): BEGUN}, have={(0, 1)})
    engine, carried = Engine(), {} if begun is None else {(0, 2): begun}
    samples, metrics = run_step(tmp_path, engine, begun=carried, have={(0, 1)})
    assert ((0, 2) not in engine.asked) == is_reused and metrics["rollout_cache/reused"] == 4 + is_reused
    assert {(s.prompt_id, s.sample_index) for s in samples} == ALL - {(0, 1)}, "it waits for its group"
    killed(tmp_path / "new", 5)
    run_step(tmp_path / "new", engine, begun={(0, 2): BEGUN})
    assert (0, 2) in engine.asked, "what was cached is no continuation"


def test_covered_steps_are_removed_at_the_start_and_on_the_way(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"rollout_cache/step-00000{step}").mkdir(parents=True)
    (tmp_path / "rollout_cache/step-000001.old").touch()  # a copy made by hand: it is not read

    def left() -> list[str]:
        return sorted(path.name for path in (tmp_path / "rollout_cache").iterdir() if path.is_dir())

    cache = make(tmp_path, Engine())
    cache.start(1)
    assert left() == ["step-000002", "step-000003", "step-000004"]
    cache.remove_until(None)
    cache.remove_until(3)
    cache.close()
    assert left() == ["step-000004"]
    cache = make(tmp_path, Engine())
    cache.clear(3)
    assert left() == ["step-000004"]
    cache.clear()
    cache.close()
    assert [path.name for path in (tmp_path / "rollout_cache").iterdir()] == ["step-000001.old"]
    (tmp_path / "rollout_cache/step-000001.old").unlink()
    cache.clear()
    assert not (tmp_path / "rollout_cache").exists()


def test_a_cache_that_is_off_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "rollout_cache/step-000001").mkdir(parents=True)
    parts: Any = (tmp_path / "rollout_cache", WORLD, Engine())
    RolloutCache(RolloutCacheSection(enabled=False), *parts, identity={}, tp=1, fresh=False).clear()
    assert (tmp_path / "rollout_cache/step-000001").exists()

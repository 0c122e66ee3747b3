"""Every reward function by itself, and how their values become one result."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from math_verify.errors import TimeoutException

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.errors import RewardError
from megatron_tlt.rewards import math
from megatron_tlt.rewards.base import compile_pattern, extract_answer, judge
from megatron_tlt.rewards.build import build_scorers, function_problems
from megatron_tlt.types import Answer, Prompt, RewardResult, Sample

USER = Path(__file__).parent / "user_rewards.py"
TAG = r"<answer>(.*?)</answer>"


def judged(text: str, *functions: RewardConfig, answer: Answer | None = None, **metadata: Any) -> RewardResult:
    section = RewardSection(functions=functions, failure_value=-1.0)
    prompt = Prompt(0, "d:0", (), "prompt", answer, "t", metadata)
    return judge(build_scorers(section), section.failure_value, prompt, Sample(0, 0, [], [], text, "stop", 0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so <answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("42", None),
        ("<answer>42", None),
    ],
)
def test_extraction_takes_group_1_of_the_last_match(text: str, found: str | None) -> None:
    assert extract_answer(re.compile(TAG, re.DOTALL), text) == found
    assert extract_answer(None, f" {text}\n") == text


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (TAG, "I write it in <answer>, like this: <answer>7</answer>", "7"),
        (TAG, "Between <answer> and </answer> stands <answer>7</answer>", "7"),
        (r"(?<=<answer>)\s*(.*?)(?=</answer>)", "in <answer> tags: <answer> 7</answer>", "7"),
        (r"</think>\s*<answer>(.*?)</answer>", "</think><answer> is here: <answer>7</answer>", "7"),
        # What only looks like that is the pattern's own.
        (r"<answer>(.*)</answer>", "<answer>1</answer> or <answer>7</answer>", "1</answer> or <answer>7"),
        (r"> (.*?) </b", "1> 2> 7 </b", "2> 7"),
        (r"(-?\d+)", "it is -12", "-12"),
        (r"answer is (.*?)\.", "The answer is 7, as the answer is odd.", "7, as the answer is odd"),
        (r"####\s*(.*)", "#### 7 #### 8", "7 #### 8"),
        (r"\\boxed\{(.*)\}", r"\boxed{\boxed{7}}", r"\boxed{7}"),
    ],
)
def test_a_tag_that_is_only_mentioned_is_no_part_of_the_answer(pattern: str, text: str, found: str) -> None:
    assert extract_answer(compile_pattern(pattern), text) == found


def test_exact() -> None:
    plain, tagged = RewardConfig(name="exact"), RewardConfig(name="exact", pattern=TAG)
    assert judged(" 42\n", plain, answer="42").value == 1.0
    assert judged("42.", plain, answer="42").value == 0.0
    assert judged("it is <answer>42</answer>", tagged, answer="42").correct
    assert judged("it is 42", tagged, answer="42").value == 0.0
    assert judged("caf\N{LATIN SMALL LETTER E WITH ACUTE}", plain, answer="cafe\N{COMBINING ACUTE ACCENT}").correct
    assert judged("", plain, answer=("", "42")).value == 0.0
    for missing in (judged("42", plain), judged("", plain, answer=" ")):
        assert missing.failure == "exact: ValueError: prompt 'd:0' has no reference answer"
        assert (missing.value, missing.correct) == (-1.0, False)


def test_the_environments_rewards_are_summed_or_the_last_one_counts() -> None:
    last = RewardConfig(name="env", turns="last")
    for turns, values in (([0.25, 1.0], (1.25, 1.0)), ([], (0.0, 0.0))):
        sample = Sample(0, 0, [], [], "", "env", 0, turn_rewards=turns)
        scorers = build_scorers(RewardSection(functions=(RewardConfig(name="env"), last)))
        assert tuple(judge(scorers, -1.0, Prompt(0, "d", (), ""), sample).parts.values()) == values
    failed = judge(scorers, -1.0, Prompt(0, "d", (), ""), Sample(0, 0, [], [], "", "abort", 0, failure="no answer"))
    assert (failed.value, failed.failure) == (-1.0, "env: no answer")


@pytest.mark.parametrize(
    ("late", "part", "answer", "failure"),
    [
        ("parser.extract_target_from_pred", "5x", "(x+2)(x+3)", "math: ValueError: the reference .* within 3 s"),
        ("parser.extract_target_from_pred", "(x+2", "(x+2)(x+3) ", None),
        ("grader.sympy_expr_eq", "", " (x+2)(x+3)", None),
    ],
)
def test_a_stall_costs_math_one_sample(late: str, part: str, answer: str, failure: str | None, monkeypatch) -> None:
    """What came of a timeout is kept for no other sample, and a reference's own is a failure."""
    module = importlib.import_module(f"math_verify.{late.partition('.')[0]}")
    name, stalls = late.partition(".")[2], [True]
    normal = getattr(module, name)

    def stalled(*args: Any, **options: Any) -> Any:
        if part in str(args[0]) and stalls and stalls.pop():
            raise TimeoutException
        return normal(*args, **options)

    for cached in (math._is_same, math._parsed, math._parsed_number):
        cached.cache_clear()
    monkeypatch.setattr(module, name, stalled)
    first, second = (judged(f"${answer}$", RewardConfig(name="math"), answer="x^2+5x+6") for _ in range(2))
    assert not stalls and first.value == (0.0 if failure is None else -1.0) and second.value == 1.0
    assert (first.failure is None) == (failure is None) and re.match(failure or "", first.failure or "")


def test_no_cache_of_math_holds_a_whole_response(monkeypatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(math, "_parsed", lambda text: kept.append(text) or ())
    before = math._is_same.cache_info().currsize
    assert judged("First 2.\n" + 50 * "word " + "and then\n7", RewardConfig(name="math"), answer="7x").value == 0.0
    assert "word" not in "".join(kept) and math._is_same.cache_info().currsize == before


def test_a_reference_that_is_not_read_in_time_does_not_hide_one_that_is_equal(monkeypatch) -> None:
    def parsed(text: str) -> Any:
        if "x^9" in text:
            raise TimeoutException
        return normal(text)

    normal = math._parsed
    monkeypatch.setattr(math, "_parsed", parsed)
    found = [judged("$(x+2)(x+3)$", RewardConfig(name="math"), answer=["x^9+1", last]) for last in ("x^2+5x+6", "7")]
    assert found[0].value == 1.0 and found[0].failure is None
    assert found[1].value == -1.0 and "'$x^9+1$' was not read within" in str(found[1].failure)


def test_format_matches_the_whole_text() -> None:
    config = RewardConfig(name="format", pattern=r"<think>.*</think>\s*<answer>.*</answer>")
    assert judged("<think>a\nb</think>\n<answer>1</answer>", config).value == 1.0
    assert judged("<think>a</think><answer>1</answer>\n", config).value == 1.0
    assert judged("<think>a</think><answer>1</answer> bye", config).value == 0.0


def test_task_uses_the_tasks_own_verifier() -> None:
    entry = reasoning_gym.create_dataset("countdown", seed=3, size=5, min_numbers=3, max_numbers=3)[2]
    numbers = {"task_name": "countdown", "task_entry": entry}
    numbers["task_params"] = {"min_numbers": 3, "max_numbers": 3}
    expression = entry["metadata"]["expression"]
    assert judged(f"<answer>{expression}</answer>", RewardConfig(name="task", pattern=TAG), **numbers).correct
    reverse = f"({expression}) + 0"
    assert judged(reverse, RewardConfig(name="task"), **numbers).value < 1.0
    assert judged("nothing", RewardConfig(name="task", pattern=TAG), **numbers).value == 0.0
    assert "no procedural task" in (judged("1", RewardConfig(name="task")).failure or "")


def test_python_by_file_with_parameters() -> None:
    config = RewardConfig(name="python", path=f"{USER}:good", params={"bonus": 0.5})
    assert judged("7", config, answer="7").value == 1.5
    assert judged("8", config, answer="7").parts == {"good": 0.5}


def test_python_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(USER.parent))
    assert judged("7", RewardConfig(name="python", path="user_rewards:good"), answer="7").value == 1.0
    section = RewardSection(functions=(RewardConfig(name="python", path="posixpath:isabs"),))
    with pytest.raises(RewardError, match=r"isabs.*takes"):
        build_scorers(section)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:f", "no_such_module_here cannot be imported: ModuleNotFoundError"),
        ("no_such_file.py:f", r"no_such_file\.py: no such file"),
        (f"{USER}:goood", "has no 'goood'; did you mean good?"),
        (f"{USER}:NOT_A_FUNCTION", "is a int, not a function"),
        (f"{USER}:too_few", r"called as f\(prompt, answer, response, metadata\), but it takes \(prompt"),
    ],
)
def test_python_that_cannot_be_called_is_refused_by_name(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build_scorers(RewardSection(functions=(RewardConfig(name="python", path=path),)))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("\nimport nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' .*broken.py:2"),
        ("x = 1\nx / 0", r"ZeroDivisionError: division by zero \(.*broken.py:2\)"),
        ("import sys; sys.exit('bye')", r"SystemExit: bye \(.*broken.py:1\)"),
    ],
)
def test_a_module_that_raises_at_import_is_named_with_its_field(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    broken = RewardConfig(name="python", path=f"{tmp_path}/broken.py:f")
    functions = (RewardConfig(name="exact"), broken, RewardConfig(name="python", path=f"{USER}:no"))
    first, second = function_problems(RewardSection(functions=functions))
    assert (first.path, second.path) == ("rewards.functions.1.path", "rewards.functions.2.path")
    assert re.search(rf"broken\.py cannot be imported: {why}", first.allowed) and "\n" not in str(first)
    with pytest.raises(RewardError, match=rf"reward '.*broken\.py:f': .* cannot be imported: {why}"):
        build_scorers(RewardSection(functions=functions))


def test_values_are_weighted_and_correct_means_all_that_count() -> None:
    exact = RewardConfig(name="exact", pattern=r"= (\d+)")
    form = RewardConfig(name="format", pattern=r".* = \d+", weight=0.25, threshold=None)
    result = judged("6 x 7 = 42", exact, form, answer="42")
    assert result == RewardResult(1.25, True, {"exact": 1.0, "format": 1.0})
    assert judged("6 x 7 = 42!", exact, form, answer="42") == RewardResult(1.0, True, {"exact": 1.0, "format": 0.0})
    strict = form.model_copy(update={"threshold": 1.0})
    assert not judged("6 x 7 = 42!", exact, strict, answer="42").correct
    assert not judged("6 x 7 = 42", form).correct  # nothing counts
    auto = RewardConfig(name="python", path=f"{USER}:act")
    assert judged("1", auto).correct and not judged("0.926", auto).correct
    low = RewardConfig(name="python", path=f"{USER}:act", threshold=0.3)
    assert judged("0.4", low).correct
    assert not judged("0.2", low).correct


@pytest.mark.parametrize(("weight", "is_taken"), [(1e308, False), (1e101, False), (-1e101, False), (1e99, True)])
def test_a_sum_whose_square_no_float_holds_is_a_failure(weight: float, is_taken: bool) -> None:
    huge = RewardConfig(name="python", path=f"{USER}:act", weight=weight)
    result = judged("2", huge, huge)
    assert (result.failure is None) == is_taken
    assert is_taken or (result.value == -1.0 and not result.correct and "must be at most 1e+100" in str(result.failure))

"""Special tokens in stop strings and patterns."""

from __future__ import annotations

import pytest

from megatron_tlt.data.special_tokens import pattern_problem, stop_problems

SPECIAL = frozenset({"<|end|>", "<answer>", "</answer>"})


@pytest.mark.parametrize(
    ("pattern", "is_needed"),
    [
        (r"<answer>(.*?)</answer>", True),
        (r"(\d+)<\|end\|>", True),
        (r"(\d+)(?:<\|end\|>)+", True),
        (r"(\d+)(?=<\|end\|>)", True),
        (r"(\d+)(<\|end\|>)?", False),
        (r"(\d+)(?:<\|end\|>|$)", False),
        (r"(\d+)[<|end>]", False),
        (r"(\d+)(?!<\|end\|>)", False),
        (r"<think>(.*)", False),
        (r"<answer>(", False),
    ],
)
def test_a_pattern_that_needs_a_special_token_is_refused(pattern: str, is_needed: bool) -> None:
    problem = pattern_problem("rewards.functions.0.pattern", pattern, SPECIAL)
    assert (problem is not None) == is_needed
    assert problem is None or "needs the special token '<" in str(problem)


def test_a_stop_string_is_a_special_token_or_has_none() -> None:
    assert not [*stop_problems("rollout.stop", ["<|end|>", "end", "</think>"], SPECIAL)]
    problems = [*stop_problems("rollout.stop", ["</answer>\n", "a<|end|>"], SPECIAL)]
    assert ["'</answer>' alone" in str(problems[0]), "'<|end|>' alone" in str(problems[1])] == [True, True]

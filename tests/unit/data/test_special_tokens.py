"""Special tokens of a tokenizer's files, in stop strings and patterns."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.data.special_tokens import (
    named_tokens_of,
    pattern_problem,
    special_tokens_of,
    stop_problems,
)
from megatron_tlt.data.tokenizer import HFTokenizer
from tests.helpers.chat_models import DEMO_POLICY, chat_model

SPECIAL = frozenset({"<|end|>", "<answer>", "</answer>"})


def test_the_files_name_the_tokens_that_transformers_skips(tmp_path: Path) -> None:
    decoder = {"2": {"content": "<|end|>", "special": True}, "9": {"content": "<think>", "special": False}}
    end = {"__type": "AddedToken", "content": "<|end|>"}
    listed = chat_model(tmp_path / "m", "x", added_tokens_decoder=decoder, eos_token=end)
    for directory in (DEMO_POLICY, listed):
        assert special_tokens_of(directory) == set(HFTokenizer(directory).special_tokens)
        assert named_tokens_of(directory).items() <= HFTokenizer(directory)._tokenizer.special_tokens_map.items()


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

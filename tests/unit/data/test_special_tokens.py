"""Special tokens in stop strings."""

from __future__ import annotations

from megatron_tlt.data.special_tokens import stop_problems

SPECIAL = frozenset({"<|end|>", "<answer>", "</answer>"})


def test_a_stop_string_is_a_special_token_or_has_none() -> None:
    assert not [*stop_problems("rollout.stop", ["<|end|>", "end", "</think>"], SPECIAL)]
    problems = [*stop_problems("rollout.stop", ["</answer>\n", "a<|end|>"], SPECIAL)]
    assert ["'</answer>' alone" in str(problems[0]), "'<|end|>' alone" in str(problems[1])] == [True, True]

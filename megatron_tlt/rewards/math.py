"""Mathematical equality with the reference answer, by `math-verify` (sympy)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from megatron_tlt.config.data import RewardConfig
from megatron_tlt.rewards.base import Scorer, compile_pattern, extract_answer, references_of
from megatron_tlt.types import Prompt, Sample

# math-verify stops itself after so many seconds, by SIGALRM: rewards run in a process's main thread. An
# expression that takes longer is simply not equal, which is cheaper than the pool killing a worker over it.
_TIMEOUT_S = 3
_MARKS = ("$", r"\(", r"\[", r"\boxed")


def math_reward(config: RewardConfig) -> Scorer:
    """1 if the answer equals the reference as mathematics (1/2 = 0.5 = \\frac{1}{2}), else 0.

    Raises ValueError for a prompt whose reference is missing or cannot be parsed.
    """
    pattern = compile_pattern(config.pattern)

    def score(prompt: Prompt, sample: Sample) -> float:
        references = [_marked(reference) for reference in references_of(prompt)]
        if not any(map(_parsed, references)):
            raise ValueError(
                f"the reference answer {prompt.answer!r} of {prompt.dataset_id!r} cannot be parsed"
            )
        answer = extract_answer(pattern, sample.text)
        if answer is None:
            return 0.0
        # Without a pattern math-verify looks for the answer in the text itself.
        text = answer if pattern is None else _marked(answer)
        return float(any(_equal(reference, text) for reference in references))

    return score


# sympy takes milliseconds, and the answers to one prompt share the reference and often each other's value.
@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    return tuple(parse(text, parsing_timeout=_TIMEOUT_S))


@lru_cache(maxsize=4096)
def _equal(reference: str, text: str) -> bool:
    equal: bool = verify(list(_parsed(reference)), list(_parsed(text)), timeout_seconds=_TIMEOUT_S)
    return equal


def _marked(expression: str) -> str:
    """The expression as math-verify recognises it: between dollar signs unless it is marked already."""
    return expression if any(mark in expression for mark in _MARKS) else f"${expression}$"

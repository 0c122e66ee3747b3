"""Conversations of the cold starts: wrong first tries, right second ones, calls that the environment reads."""

from __future__ import annotations

from pathlib import Path

import demo_traces
from agent_traces import second_tries, tool_calls

from megatron_tlt.envs.calculator import Calculator
from megatron_tlt.envs.tools import ToolEnvironment

CONFIG = Path(__file__).resolve().parents[3] / "configs/agents/smollm2_calculator.yaml"


def test_the_first_try_is_wrong_and_the_second_one_right() -> None:
    examples = list(demo_traces.generate(200, seed=5))
    for example, conversation in zip(examples, second_tries(200, seed=5), strict=True):
        question, first, _, last = (message["content"] for message in conversation)
        assert (question, last) == (example.prompt, example.completion)
        answer = demo_traces.extract_answer(first)
        assert answer is not None and answer != demo_traces.extract_answer(last)


def test_calls_are_answered_as_the_environment_does() -> None:
    conversations = list(tool_calls(CONFIG, 100, seed=1))
    with_call = [c for c in conversations if c[-2]["role"] == "tool"]
    assert 5 < len(with_call) < 40
    for *_, call, observed, response in with_call:
        step = ToolEnvironment(Calculator()).step(call["content"])
        assert (step.observation, step.role, step.done) == (observed["content"], "tool", False)
        assert response["content"] == f"<answer>{step.observation}</answer>"

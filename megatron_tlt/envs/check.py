"""Before a run: an environment is played three times with a scripted policy, and must answer alike.

Twice in one process (state that trajectories share), once in another (the order of sets, seeds of the process).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.base import Step, ToolSchema
from megatron_tlt.envs.build import environment_tools
from megatron_tlt.envs.process import EnvWorker
from megatron_tlt.envs.schemas import example_arguments
from megatron_tlt.envs.worker import Discard, Open, Play
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.types import Prompt
from megatron_tlt.workers.worker import WorkerError

_TEXTS = ("1", "<answer>2</answer>", "I guess 10, or crane.", "")


def episode_problems(section: EnvSection, prompt: Prompt) -> list[ConfigProblem]:
    """An environment that fails on a scripted episode, or answers it otherwise the second time. Starts two processes.

    `prompt`: any one of the run. Raises EnvError where the environment cannot be loaded.
    """
    field, value = section.named_by
    texts = script(environment_tools(section))[: section.max_turns]
    workers = [EnvWorker(section), EnvWorker(section)]
    try:
        futures = [w.do(lambda w=w, n=n: _episode(w, n, prompt, texts)) for n, w in enumerate((*workers, workers[0]))]  # type: ignore[misc]
        first, *others = [future.result() for future in futures]
    except WorkerError as error:
        return [ConfigProblem(field, value, f"fails on prompt {prompt.dataset_id!r}: {error}")]
    finally:
        for worker in workers:
            worker.close()
    if not prompt.text and first[0] is None:
        return [ConfigProblem(field, value, "must return a text from reset: the prompt is empty")]
    for other in others:
        if other != first:
            place = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
            answers = [repr(episode[place : place + 1])[:200] for episode in (first, other)]
            call = "reset" if place == 0 else f"step({texts[place - 1]!r})"
            allowed = (
                f"must be a function of prompt, seed and turns, or responses cannot be repeated: {call}, answer "
                f"{place} of two equal episodes, returned {answers[0]} and {answers[1]}"
            )
            return [ConfigProblem(field, value, allowed)]
    return []


def script(tools: Sequence[ToolSchema]) -> list[str]:
    """The turns of a policy that tries everything: a call of each tool with made-up arguments, or some answers."""
    return [*map(_call, tools), *_TEXTS]


def _call(tool: ToolSchema) -> str:
    call = {"name": tool["function"]["name"], "arguments": example_arguments(tool)}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _episode(worker: EnvWorker, number: int, prompt: Prompt, texts: Sequence[str]) -> list[str | Step | None]:
    """The text of `reset` and the answers until the end. In the worker's thread. Raises WorkerError."""
    key = 0, number
    answers: list[str | Step | None] = [worker.ask(Open(prompt))]
    for turn, text in enumerate(texts):
        request = Play(key, Open(prompt) if turn == 0 else None, (text,))
        (step,) = worker.ask(request, request.num_calls)
        answers.append(step)
        if step.done:
            break
    worker.ask(Discard(key))
    return answers

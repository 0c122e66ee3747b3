"""The demo policy's curriculum: a mix of reasoning-gym tasks and a worked solution ("trace") for each prompt.

The prompts are the ones RL sees later (`MIX`: the tasks of configs/quickstart.yaml); the traces are what supervised
fine-tuning teaches. A completion is always

    <scratchpad, one small step a line>\n<answer>FINAL</answer>

Three ideas keep every step within reach of a model of 2M parameters:

- *Sums* are worked column by column, units first, every digit and carry written out: a step needs one entry of the
  addition table and nothing else. (Writing only the reversed result was tried: 3.6M tokens taught copying, not adding.)
  The line after it repeats the rest of the expression: the next step looks at the first two terms of one line.
- *Sorting* is by insertion: each line names the next number of the prompt, then the sorted list so far.
- *Spelling* numbers the letters first, so a repeated letter is never ambiguous.

Long sums and long lists have traces of quadratic length: they give the heavy tail of answer lengths that
rollout scheduling is about.

A module for `make_demo_policy.py`, not a command.
Everything here is a function of `(MIX, count, seed)`: same arguments, same examples, on every machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import reasoning_gym

from megatron_tlt.config.load import load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from megatron_tlt.config.data import TaskConfig

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
_QUICKSTART = load_config(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
MIX = _QUICKSTART.data.train.tasks
ANSWER_PATTERN = _QUICKSTART.rewards.functions[0].pattern

# reasoning-gym seeds item i of a dataset with `seed + i`. SFT data lives above this offset, far from the
# small seeds people write into RL configurations, so no RL prompt stream walks through the SFT examples.
_SFT_SEED_BASE = 1_000_000_000
_SEED_STRIDE = 10_000_000


@dataclass(frozen=True)
class Example:
    """One supervised example. `prompt` is the bare question: the chat template is applied by the trainer."""

    task: str
    prompt: str
    completion: str
    entry: Mapping[str, Any]


def column_sums(left: int, right: int) -> str:
    """Column addition of two numbers >= 0, units first: ``7+7=14,5+8+1=14`` for 57 + 87.

    The shorter number is filled up with zeros, so that every column has the same form; ``+1`` is the carry.
    """
    width, carry, columns = max(len(str(left)), len(str(right))), 0, []
    for a, b in zip(reversed(f"{left:0{width}}"), reversed(f"{right:0{width}}"), strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ",".join(columns)


def sum_trace(expression: str) -> tuple[str, str]:
    """Scratchpad and result of a sum such as ``57 + 87 + 5``, worked from left to right.

    Each line is one column addition and its result; the line after it is the expression that remains, so the
    next step always looks at the first two terms of one line.
    """
    terms = [int(term) for term in re.findall(r"\d+", expression)]
    lines, total = [], terms[0]
    for position, term in enumerate(terms[1:], start=2):
        lines.append(f"{column_sums(total, term)}={total + term}")
        total += term
        if terms[position:]:
            lines.append(" + ".join(map(str, [total, *terms[position:]])))
    return "\n".join(lines), str(total)


def sorting_trace(numbers: list[str], direction: str) -> tuple[str, str]:
    """Scratchpad and result of an insertion sort; `direction` is "ascending" or "descending"."""
    values = [int(float(n)) for n in numbers]
    done: list[int] = []
    lines = []
    for value in values:
        done = sorted([*done, value], reverse=direction == "descending")
        lines.append(f"{value}: {', '.join(map(str, done))}")
    return "\n".join(lines), str([str(v) for v in done])


def spelling_trace(word: str) -> tuple[str, str]:
    """Scratchpad and result of spelling `word` backward: letters numbered, then read off from the end."""
    numbered = [f"{i}{letter}" for i, letter in enumerate(word, start=1)]
    return "".join(numbered) + "\n" + "".join(reversed(numbered)), word[::-1]


_TRACERS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "basic_arithmetic": lambda meta: sum_trace(meta["expression"]),
    "number_sorting": lambda meta: sorting_trace(meta["original_numbers"], meta["direction"]),
    "spell_backward": lambda meta: spelling_trace(meta["word"]),
}


def solve(entry: Mapping[str, Any]) -> str:
    """The completion taught for a reasoning-gym `entry` (without the end-of-sequence token)."""
    scratchpad, answer = _TRACERS[entry["metadata"]["source_dataset"]](entry["metadata"])
    return f"{scratchpad}\n{ANSWER_OPEN}{answer}{ANSWER_CLOSE}"


def extract_answer(completion: str) -> str | None:
    """The text of the last complete answer tag, or None where there is none."""
    found = re.findall(ANSWER_PATTERN, completion, flags=re.DOTALL)
    return found[-1] if found else None


def is_correct(dataset: Any, completion: str, entry: Mapping[str, Any]) -> bool:
    """Whether the task's own verifier gives full marks (some give part marks: those count as wrong)."""
    answer = extract_answer(completion)
    return answer is not None and dataset.score_answer(answer, entry) >= 1.0


def open_dataset(task: TaskConfig, seed: int, size: int) -> Any:
    """The reasoning-gym dataset of one task of the mix."""
    return reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.params)


def generate(count: int, seed: int) -> Iterator[Example]:
    """Yield `count` examples drawn from `MIX`; `seed` (0, 1, 2, …) selects disjoint streams of prompts.

    Raises:
        ValueError: a trace does not satisfy its task's verifier (a bug in this file), or `count` would run
            into the next seed's stream.
    """
    if count > _SEED_STRIDE:
        raise ValueError(f"count {count} is larger than a stream, {_SEED_STRIDE}")
    rng = Random(seed)
    datasets = [open_dataset(task, _SFT_SEED_BASE + seed * _SEED_STRIDE, count) for task in MIX]
    drawn = rng.choices(range(len(MIX)), weights=[task.weight for task in MIX], k=count)
    for position, which in enumerate(drawn):
        entry = datasets[which][position]
        completion = solve(entry)
        if not is_correct(datasets[which], completion, entry):
            raise ValueError(f"{MIX[which].name}: the trace fails its verifier: {entry['question']!r}")
        yield Example(MIX[which].name, entry["question"], completion, entry)

"""Worked solutions for the cold start of `real.py`: the tasks that a run's configuration names, solved in sentences.

A response of the cold-started policy has one line a term of a sum, so that sums of 12 terms make the long tail of its
lengths; one that counts letters spells the words, a line each; word problems have the steps that gsm_symbolic gives.
All end with `<answer>..</answer>`, as the rewards of `real.yaml` ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megatron_tlt.config.data import PromptSourceConfig

Entry = Mapping[str, Any]  # an entry of a reasoning-gym data set


def worked_sum(entry: Entry) -> str:
    """The solution of a `chain_sum` entry, one line a term.

    Raises ValueError if the entry's answer is not the sum of its terms.
    """
    expression = entry["metadata"]["expression"].replace(" ", "")
    first, *terms = (int(term) for term in expression.replace("-", "+-").split("+"))
    total, lines = first, [f"Start with {first}."]
    for term in terms:
        verb, sign = ("Add", "+") if term >= 0 else ("Subtract", "-")
        lines.append(f"{verb} {abs(term)}: {total} {sign} {abs(term)} = {total + term}.")
        total += term
    if str(total) != entry["answer"]:
        raise ValueError(f"{entry['metadata']['expression']} = {total}, and not {entry['answer']}")
    return "\n".join([*lines, f"<answer>{total}</answer>"])


def worked_word_problem(entry: Entry) -> str:
    """The solution of a `gsm_symbolic` entry: its steps without the answer's line of their own."""
    steps = re.split(r"\s*####", entry["metadata"]["answer_cot"])[0].strip()
    return f"{steps}\n<answer>{entry['answer']}</answer>"


def worked_count(entry: Entry) -> str:
    """The solution of a `letter_counting` entry: each word spelled, and the letters found so far.

    Raises ValueError if the entry's answer is not their number.
    """
    letter, found, lines = entry["metadata"]["target_letter"], 0, []
    for word in entry["metadata"]["span"]:
        found += word.lower().count(letter)
        lines.append(f"{' '.join(word.lower())}: {found}")
    if str(found) != entry["answer"]:
        raise ValueError(f"{found} times {letter!r} in {entry['metadata']['span']}, and not {entry['answer']}")
    return "\n".join([*lines, f"<answer>{found}</answer>"])


SOLUTIONS = {"chain_sum": worked_sum, "letter_counting": worked_count, "gsm_symbolic": worked_word_problem}


def write_solutions(source: PromptSourceConfig, count: int, path: Path, seed: int) -> None:
    """Writes `count` lines {"prompt", "completion"} of the tasks of `source`, by their weights, in random order.

    `seed`: of the tasks; one that is not the run's gives other prompts. Raises ValueError for a task that has no
    worked solution here.
    """
    import reasoning_gym

    if unknown := {task.name for task in source.tasks} - SOLUTIONS.keys():
        raise ValueError(f"no worked solutions of {', '.join(sorted(unknown))}: only of {', '.join(SOLUTIONS)}")
    rng = np.random.default_rng(seed)
    weights = np.array([task.weight for task in source.tasks])
    counts = rng.multinomial(count, weights / weights.sum())
    rows = []
    for number, (task, size) in enumerate(zip(source.tasks, counts, strict=True)):
        entries = reasoning_gym.create_dataset(task.name, size=max(1, int(size)), seed=seed + number, **task.params)
        solve = SOLUTIONS[task.name]
        rows += [{"prompt": e["question"], "completion": solve(e)} for e in entries][: int(size)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rows[i]) for i in rng.permutation(len(rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

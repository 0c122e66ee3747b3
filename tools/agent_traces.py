"""Writes conversations for the cold starts of configs/agents, to be trained on by `megatron-tlt sft`:

    .venv/bin/python tools/agent_traces.py retry --count 2000 --out runs/agents-retry-sft/traces.jsonl
    .venv/bin/python tools/agent_traces.py calculator --count 400 --out runs/smollm2-calculator/traces.jsonl

retry        a wrong response, the environment's text, the worked solution (`demo_traces.py`): only the last has a loss
calculator   for a sixth of the prompts a call of `calculate`, its result and the response; for the others the
             response at once, which the model cannot compute: reinforcement learning finds out what pays

Everything is a function of `--count`, `--seed` and, for `calculator`, the tasks and the system prompt of `--config`.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import demo_traces
import reasoning_gym

from megatron_tlt.config.checks.files import output_file_problems
from megatron_tlt.config.load import load_config
from megatron_tlt.envs.calculator import Calculator
from megatron_tlt.envs.retry import Retry

ROOT = Path(__file__).resolve().parents[1]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CALL_SHARE = 1 / 6  # of the calculator's conversations: enough to learn the form, few enough for RL to have work
_SEED_BASE = 1_000_000_000  # of reasoning-gym: far from the seeds of configurations and of `TaskSource`
Conversation = list[dict[str, str]]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def wrong_solution(entry: Mapping[str, Any], rng: Random) -> str:
    """The worked solution of a question that differs in one digit or letter: a slip, with what follows from it."""
    meta = dict(entry["metadata"])
    name = next(name for name in ("expression", "original_numbers", "word") if name in meta)
    if name == "original_numbers":
        which = rng.randrange(len(meta[name]))
        meta[name] = [_changed(n.split(".")[0], rng) if i == which else n for i, n in enumerate(meta[name])]
    else:
        meta[name] = _changed(meta[name], rng)
    return demo_traces.solve({**entry, "metadata": meta})


def _changed(text: str, rng: Random) -> str:
    place = rng.choice([i for i, letter in enumerate(text) if letter.isalnum()])
    kind = "0123456789" if text[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    return text[:place] + rng.choice(kind.replace(text[place], "")) + text[place + 1 :]


def second_tries(count: int, seed: int) -> Iterator[Conversation]:
    """Conversations of `retry` with the demo policy's tasks."""
    rng = Random(seed)
    word = inspect.signature(Retry).parameters["text"].default
    for example in demo_traces.generate(count, seed):
        first_try = [message("assistant", wrong_solution(example.entry, rng)), message("user", word)]
        yield [message("user", example.prompt), *first_try, message("assistant", example.completion)]


def tool_calls(config_path: Path, count: int, seed: int) -> Iterator[Conversation]:
    """Conversations with the calculator, about the training tasks of a configuration, by their weights."""
    data, rng = load_config(config_path).data, Random(seed)
    datasets = [
        reasoning_gym.create_dataset(task.name, size=count, seed=_SEED_BASE + seed * count, **task.params)
        for task in data.train.tasks
    ]
    system = [] if data.system_prompt is None else [message("system", data.system_prompt)]
    for number, dataset in enumerate(rng.choices(datasets, [task.weight for task in data.train.tasks], k=count)):
        entry = dataset[number]
        answer = message("assistant", f"<answer>{entry['answer']}</answer>")
        use = _use(entry["metadata"]["expression"], entry["answer"]) if rng.random() < _CALL_SHARE else []
        yield [*system, message("user", entry["question"]), *use, answer]


def _use(expression: str, answer: str) -> Conversation:
    value = Calculator().calculate(expression)
    if value != answer:
        raise ValueError(f"{expression} is {value}, and not {answer}")
    call: dict[str, Any] = {"name": "calculate", "arguments": {"expression": expression}}
    return [message("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"), message("tool", value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["retry", "calculator"])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other prompts")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/agents/smollm2_calculator.yaml")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if problems := output_file_problems("--out", args.out, rb'\{"messages": ', [args.config]):
        parser.error(str(problems[0]))
    if args.kind == "retry":
        rows = second_tries(args.count, args.seed)
    else:
        rows = tool_calls(args.config, args.count, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()

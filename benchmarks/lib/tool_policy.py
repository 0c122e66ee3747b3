"""A policy that calls tools: the demo policy after supervised fine-tuning on calls and on answers that copy the tool's.

    python benchmarks/lib/tool_policy.py [--steps 120] [--folder runs/tool-policy]

It calls `calculate` for sums and `python` for lists and words, in Qwen's form, and gives the observation as its answer:

    12 + 5 + 9 =?    <tool_call>{"name": "calculate", "arguments": {"expression": "12 + 5 + 9"}}</tool_call>
    26               <answer>26</answer>

Tasks are those of `calculator.yaml` and `python.yaml` with other seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.bench_record import ROOT
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.envs.calculator import Calculator

CONFIGS = {name: ROOT / f"benchmarks/lib/{name}.yaml" for name in ("calculator", "python")}
FOLDER = ROOT / "runs/tool-policy"
TRAIN_SEED, HELD_OUT_SEED = 10**9, 2 * 10**9
Entry = Mapping[str, Any]  # an entry of a reasoning-gym data set


def call_of(entry: Entry) -> tuple[str, str]:
    """The tool call for an entry, and its observation: the entry's answer in the form that the task expects."""
    meta = entry["metadata"]
    match meta["source_dataset"]:
        case "basic_arithmetic":
            name, argument, value = "calculate", "expression", meta["expression"]
            observation = Calculator().calculate(value)
        case "number_sorting":
            numbers = [int(float(n)) for n in meta["original_numbers"]]
            is_descending = meta["direction"] == "descending"
            name, argument = "python", "code"
            value = f"print([str(n) for n in sorted({numbers}{', reverse=True' if is_descending else ''})])"
            observation = str([str(n) for n in sorted(numbers, reverse=is_descending)])
        case "spell_backward":
            name, argument, value = "python", "code", f"print('{meta['word']}'[::-1])"
            observation = meta["word"][::-1]
        case other:
            raise ValueError(f"no tool for {other}")
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {argument: value}})}</tool_call>", observation


def records(entry: Entry) -> Iterator[dict[str, Any]]:
    """A record of `sft.train_path` for each turn: the loss is on its last message."""
    call, observation = call_of(entry)
    messages = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": call}]
    yield {"messages": messages}
    answer = {"role": "assistant", "content": f"<answer>{observation}</answer>"}
    yield {"messages": [*messages, {"role": "user", "content": observation}, answer]}


def write_turns(path: Path, trajectories: int, seed: int) -> None:
    """Writes the turns of so many trajectories of either tool, in random order."""
    import reasoning_gym

    rng, rows = np.random.default_rng(seed), []
    for config in CONFIGS.values():
        source = load_config(config, [], Config).data.train
        weights = np.array([task.weight for task in source.tasks])
        counts = rng.multinomial(trajectories, weights / weights.sum())
        for task, count in zip(source.tasks, counts, strict=True):
            entries = reasoning_gym.create_dataset(task.name, size=max(1, int(count)), seed=seed, **task.params)
            rows += [record for entry in list(entries)[:count] for record in records(entry)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(rows[i]) + "\n" for i in rng.permutation(len(rows))), encoding="utf-8")


def make_tool_policy(folder: Path = FOLDER, steps: int = 120) -> Path:
    """The policy's directory, trained if it is not there. Raises CalledProcessError if the training fails."""
    policy = folder / "policy"
    if not (policy / "config.json").exists():
        train, held_out = folder / "train.jsonl", folder / "held-out.jsonl"
        write_turns(train, 3000, TRAIN_SEED)
        write_turns(held_out, 100, HELD_OUT_SEED)
        start = [str(ROOT / "launch/local.sh"), "-n", "2", "--cmd", "sft", str(ROOT / "benchmarks/lib/tool-sft.yaml")]
        paths = [f"sft.train_path={train}", f"sft.eval_path={held_out}", f"sft.out={policy}"]
        subprocess.run([*start, *paths, f"sft.num_steps={steps}"], cwd=ROOT, check=True)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=120, help="120: it still slips, as RL needs it")
    args = parser.parse_args()
    print(make_tool_policy(args.folder, args.steps))


if __name__ == "__main__":
    main()

"""Writes prompts as JSON lines, {"prompt": ..., "answer": ...}: 64 to train on and 16 to evaluate on."""

import json
import random
from pathlib import Path

HERE = Path("runs/own-reward-data")


def row(rng: random.Random) -> dict[str, str]:
    """A sum of three to five numbers, and its value as the reference answer."""
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 5))]
    return {"prompt": f"Calculate {' + '.join(map(str, numbers))}.", "answer": str(sum(numbers))}


rng = random.Random(0)
HERE.mkdir(parents=True, exist_ok=True)
for name, count in (("train", 64), ("heldout", 16)):
    lines = [json.dumps(row(rng)) for _ in range(count)]
    (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

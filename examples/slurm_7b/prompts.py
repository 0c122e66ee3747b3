"""Worked solutions to prompts: prompts.py PROBLEMS.jsonl OUT.jsonl

A line of PROBLEMS has "question" or "problem", and "answer", a result alone or behind "####" (as in GSM8K), or
"solution" with the result in its last \\boxed{...} (as in MATH). OUT gets lines of {"prompt": ..., "answer": ...}.
"""

import json
import re
import sys
from pathlib import Path

ASK = "\nReason step by step, and put the final result into \\boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}|([^\s$]+))")


def to_prompt(record: dict[str, str]) -> dict[str, str]:
    """One problem as a prompt, and its reference answer. Raises ValueError."""
    text, answer = record.get("question") or record.get("problem"), record.get("answer")
    if text is None or (answer is None and "solution" not in record):
        needed = '"question" or "problem", and "answer" or "solution"'
        raise ValueError(f"needs {needed}; it has {', '.join(record)}")
    if answer is not None:
        return {"prompt": text + ASK, "answer": answer.rsplit("####", 1)[-1].strip()}
    boxes = BOX.findall(record["solution"])
    if not boxes:
        raise ValueError("its solution has no \\boxed{...}")
    return {"prompt": text + ASK, "answer": next(filter(None, boxes[-1]), "").strip()}


def main(problems: str, out: str) -> None:
    """Converts the file; a line that is no problem ends it with the line's number, and nothing is written."""
    rows = []
    for number, line in enumerate(Path(problems).read_text().splitlines(), 1):
        try:
            rows.append(to_prompt(json.loads(line)))
        except (AttributeError, TypeError, ValueError) as error:
            raise SystemExit(f"{problems}, line {number}: cannot be read: {error}") from None
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])

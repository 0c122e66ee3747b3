"""Worked solutions to prompts: prompts.py PROBLEMS.jsonl OUT.jsonl

PROBLEMS has lines of {"question": ..., "answer": "... #### 42"} (the form of GSM8K) or {"problem": ..., "answer": ...}
(the form of MATH). OUT gets lines of {"prompt": ..., "answer": ...}.
"""

import json
import sys
from pathlib import Path

ASK = "\nReason step by step, and put the final result into \\boxed{}."


def to_prompt(record: dict[str, str]) -> dict[str, str]:
    """One problem as a prompt; the reference answer is the text behind the last ####, or the field itself."""
    text = record.get("question") or record["problem"]
    answer = record["answer"].rsplit("####", 1)[-1].strip()
    return {"prompt": text + ASK, "answer": answer}


def main(problems: str, out: str) -> None:
    """Converts the file; a line that is no problem ends with its number and nothing is written."""
    rows = []
    for number, line in enumerate(Path(problems).read_text().splitlines(), 1):
        try:
            rows.append(to_prompt(json.loads(line)))
        except (KeyError, ValueError) as error:
            raise SystemExit(f"{problems}, line {number}: no problem: {error!r}") from None
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])

"""A reward of one's own: right results, with a bonus for short responses."""

import re

FORM = re.compile(r"<answer>([^<]*)</answer>")  # not from an <answer> that the response only mentions
LONG = 400  # characters from which a right response gets no bonus


def reward(prompt: str, answer: str | None, response: str, metadata: dict) -> float:
    """1 for a response whose last <answer> is the reference answer, plus up to 0.2 if it is short; else 0."""
    found = FORM.findall(response)
    if not found or found[-1].strip() != answer:
        return 0.0
    return 1.0 + 0.2 * max(0.0, 1.0 - len(response) / LONG)

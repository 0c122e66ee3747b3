"""A run's prompts as JSON rows, and its reward of a text: what a peer needs to train or respond on the same prompts.

The parent writes the rows with this project's prompt stream; a peer's process, in an environment of its own, reads them
and scores texts by the project's reward functions. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.data import DataSection, RewardSection
from megatron_tlt.rewards.base import judge
from megatron_tlt.rewards.build import build_scorers
from megatron_tlt.types import Prompt, Sample

_FIELDS = ("prompt_id", "dataset_id", "text", "answer", "task", "metadata")  # fields of a Prompt
Row = dict[str, Any]
"""{"prompt": messages, or text where the run uses no chat template; "token_ids": what the run feeds; "fields": those of
`Prompt` that a reward reads}."""


def write_rows(prompts: Sequence[Prompt], section: DataSection, path: Path) -> None:
    """One line a prompt, in order."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            fields = {name: getattr(prompt, name) for name in _FIELDS}
            row = {"prompt": _request(prompt.text, section), "token_ids": prompt.token_ids}
            file.write(json.dumps(row | {"fields": json.dumps(fields)}) + "\n")


def _request(text: str, section: DataSection) -> str | list[dict[str, str]]:
    if not section.chat_template:
        return text
    system = section.system_prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def read_rows(path: Path) -> list[Row]:
    """The rows of `write_rows`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class RowReward:
    """The value that a run with these reward functions gives a text as the response to a row's prompt."""

    def __init__(self, section: RewardSection):
        self._scorers, self._failure_value = build_scorers(section), section.failure_value

    def __call__(self, fields: str, text: str) -> float:
        """`fields` are a row's; `text` a response without special tokens."""
        prompt = Prompt(token_ids=(), **json.loads(fields))
        sample = Sample(prompt.prompt_id, 0, [], [], text, "stop", 0)
        return judge(self._scorers, self._failure_value, prompt, sample).value

"""Before a run: how many rows of its files are longer than `data.max_prompt_tokens`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_tlt.config.data import DataSection, PromptSourceConfig
from megatron_tlt.config.root import Config
from megatron_tlt.data.chat_template import TemplateSettings
from megatron_tlt.data.prompts import encode_prompt, open_source
from megatron_tlt.data.tokenizer import HFTokenizer, has_tokenizer
from megatron_tlt.errors import CheckpointError, ConfigProblem, DataError

_MOST_COUNTED = 4096  # rows of a file: one or two seconds of the tokenizer


@dataclass(frozen=True)
class _Count:
    """Of the rows of the source in section `field`."""

    field: str
    path: str
    size: int
    counted: int
    long: int
    shortest: int  # tokens
    longest: int
    refused: str | None = None  # why the chat template or the tokenizer refuses a row

    @property
    def text(self) -> str:
        part = f"{self.size}" if self.counted == self.size else f"the first {self.counted} of {self.size}"
        return f"{self.long} of {part} rows"


def long_prompt_problems(config: Config, rows: int | None) -> list[ConfigProblem]:
    """Rows that cannot be tokenized, files in which no row fits, and any long row with `data.long_prompts: error`.

    Reads the files that are on this machine, if the tokenizer is. `rows`: of the model's embedding.
    """
    problems, data = [], config.data
    for count in _counts(data.model_dump_json(), config.model.tokenizer_path, rows):
        if count.refused is not None:
            problems.append(ConfigProblem(f"{count.field}.path", count.path, count.refused))
        elif data.long_prompts == "error" and count.long:
            needed = f"must be >= {count.longest} with data.long_prompts = error"
            allowed = f"{needed}: {count.text} of {count.path} are longer"
            problems.append(ConfigProblem("data.max_prompt_tokens", data.max_prompt_tokens, allowed))
        elif data.long_prompts == "drop" and count.long == count.size:
            allowed = f"must be >= {count.shortest}: all {count.size} rows of {count.path} are longer"
            problems.append(ConfigProblem("data.max_prompt_tokens", data.max_prompt_tokens, allowed))
    return problems


def long_prompt_warnings(config: Config, rows: int | None) -> list[str]:
    """A line for each file of which rows are dropped or cut. Reads as `long_prompt_problems` does."""
    data = config.data
    fate = "cut at their beginning" if data.long_prompts == "cut_left" else "dropped"
    return [
        f"{count.field}.path = {count.path}: {count.text} have more than data.max_prompt_tokens = "
        f"{data.max_prompt_tokens} tokens (the longest has {count.longest}) and are {fate} (data.long_prompts)"
        for count in _counts(data.model_dump_json(), config.model.tokenizer_path, rows)
        if count.long
    ]


@lru_cache(maxsize=1)  # problems and warnings come from one count
def _counts(data_json: str, tokenizer_dir: str, rows: int | None) -> tuple[_Count, ...]:
    data = DataSection.model_validate_json(data_json)
    here = [(field, source) for field, source in data.sources if source.is_here]
    if not here or not has_tokenizer(Path(tokenizer_dir)):
        return ()
    try:
        template = TemplateSettings(data.chat_template_kwargs, data.chat_template_date)
        tokenizer = HFTokenizer(tokenizer_dir, rows, template)
        return tuple(_count(data, field, source, tokenizer) for field, source in here)
    except (CheckpointError, DataError, re.error):  # named where tokenizer, files and patterns are checked
        return ()


def _count(data: DataSection, field: str, config: PromptSourceConfig, tokenizer: HFTokenizer) -> _Count:
    source = open_source(config, field, seed=0)
    assert source.size is not None
    assert config.path is not None
    chat = data.chat_template and tokenizer.has_chat_template
    lengths: list[int] = []
    refused = None
    # A token without a row in the embedding may be in any of them.
    for index in range(source.size if tokenizer.tokens_beyond else min(source.size, _MOST_COUNTED)):
        row = source.row(index)
        try:
            prompt = row.messages or row.prompt
            lengths.append(len(encode_prompt(tokenizer, prompt, chat, data.system_prompt)))
        except DataError as error:
            refused = refused or f"{row.place}: {error}"
    long = sum(length > data.max_prompt_tokens for length in lengths)
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    return _Count(field, config.path, source.size, len(lengths), long, shortest, longest, refused)

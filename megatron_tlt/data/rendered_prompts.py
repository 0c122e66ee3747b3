"""Before a run: texts with special tokens, as conversations have them that are rendered already.

Rows of other programs may have `<|im_start|>user..<|im_end|>` in a text, around which the chat template would go again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.chat import all_texts
from megatron_tlt.data.completions import read_completions
from megatron_tlt.data.prompts import open_source
from megatron_tlt.data.sources import FileSource
from megatron_tlt.data.tokenizer import HFTokenizer

_MOST_READ = 4096  # rows of a file: less than a second


def rendered_prompt_warnings(config: TrainingConfig, tokenizer: HFTokenizer | None) -> list[str]:
    """A line for each file on this machine with such rows, if they are put into a chat template; none without the
    tokenizer. For a configuration without problems.
    """
    if tokenizer is None or not (config.chat.chat_template and tokenizer.has_chat_template):
        return []
    remedy = f"{config.chat_name}.chat_template: false takes texts as they stand"
    found = [rendered_warning(rows, tokenizer, source, remedy) for source, rows in _files(config)]
    return [text for text in found if text is not None]


def rendered_warning(rows: Iterable[tuple[str, str]], tokenizer: HFTokenizer, source: str, remedy: str) -> str | None:
    """The line for rows (place, text) of `source`; None where no text has a special token. Reads the first rows."""
    read = [*islice(rows, _MOST_READ)]
    marked = [(place, token) for place, text in read if (token := tokenizer.special_token_in(text)) is not None]
    if not marked:
        return None
    (place, token), of = marked[0], f"{'the first ' * (len(read) == _MOST_READ)}{len(read)}"
    return (
        f"{source}: {len(marked)} of {of} rows have a special token in their text, as a rendered conversation has "
        f"(first {place}: {token!r}), and the chat template goes around it: {remedy}"
    )


def _files(config: TrainingConfig) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    """(field and path, rows) of every file; a row is its place and all its texts."""
    for field, given in [] if config.rl is None else config.rl.data.sources:
        if given.is_here and isinstance(source := open_source(given, field, seed=0), FileSource):
            rows = map(source.row, range(source.size))
            yield f"{field}.path = {given.path}", ((row.place, all_texts(row.messages or row.prompt)) for row in rows)
    if (section := config.records) is None:
        return
    for field, path, split in section.files:
        if Path(path).exists():
            records = zip(*read_completions(section, Path(path), split, _MOST_READ), strict=True)
            texts = ((f"{path}:{number}", "\n".join([all_texts(row.prompt), *row.turns])) for row, number in records)
            yield f"{field} = {path}", texts

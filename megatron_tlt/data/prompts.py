"""Prompt streams: tokenized prompts in an order fixed by the seed, with a position to resume from."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_tlt.config.data import DataSection, PromptSourceConfig
from megatron_tlt.data.chat import Messages, last_user_text
from megatron_tlt.data.fields import TOOLS, check_text
from megatron_tlt.data.hashing import digest, hashed
from megatron_tlt.data.json_files import read_json
from megatron_tlt.data.sources import EnvSource, FileSource, Row, Source, errors_at, first_drawn, open_file
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import (
    ConfigError,
    ConfigProblem,
    DataError,
    OpeningError,
    PromptError,
    UndrawnRowError,
    shortened,
)
from megatron_tlt.types import Answer, Prompt

Which = Literal["train", "eval"]
LongPrompts = Literal["drop", "error", "cut_left"]

_log = logging.getLogger(__name__)

# Rows of an infinite source in a row that are dropped, after which none is expected to be taken.
_MOST_DROPS_IN_A_ROW = 1000
_SEED_SHIFT = 33  # of 64 bits: some environments take 31


@dataclass(frozen=True)
class EnvPrompts:
    """What an environment adds to prompts."""

    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas, for the chat template."""
    openings: Callable[[Sequence[Prompt]], list[str | None]] | None = None
    """The texts at the end of prompts; called with the same prompts on every rank."""


NO_ENV = EnvPrompts()


def build_prompts(
    section: DataSection, which: Which, tokenizer: HFTokenizer, seed: int, env: EnvPrompts = NO_ENV
) -> PromptStream:
    """The training or held-out stream of a run with this seed.

    The held-out stream depends on its source's own seed only, so that runs of different seeds are measured on the same
    prompts; it never shares the training stream's seed; and it ends with its file, since a repeated prompt would
    count twice and make the standard error too small. Raises ConfigError and DataError (also where every prompt is too
    long).
    """
    source = section.train if which == "train" else section.eval
    assert source is not None, "config/checks requires it"
    own = hashed("train", source.seed, seed) if which == "train" else hashed("eval", source.seed)
    stream = PromptStream(
        open_source(source, f"data.{which}", own, section.system_prompt),
        tokenizer,
        seed=own,
        shuffle=source.shuffle,
        chat=section.chat_template,
        system=section.system_prompt,
        max_prompt_tokens=section.max_prompt_tokens,
        long_prompts=section.long_prompts,
        once=which == "eval",
        env=env,
    )
    start = stream.state_dict()
    stream.next_batch(1)
    stream.load_state_dict(start)
    return stream


def held_out_prompts(
    section: DataSection, tokenizer: HFTokenizer, count: int, env: EnvPrompts = NO_ENV
) -> list[Prompt]:
    """The first `count` prompts of `data.eval`, for evaluations; none without it. See `build_prompts`."""
    return [] if section.eval is None else build_prompts(section, "eval", tokenizer, 0, env).next_batch(count)


def file_prompts(
    path: Path, tokenizer: HFTokenizer, chat: bool, env: EnvPrompts = NO_ENV, seed: int = 0
) -> list[Prompt]:
    """All prompts of a JSONL file, in its order, named PATH:LINE; a record may have `token_ids` in place of `prompt`.

    `chat`: in the chat template. Seeds of environments come from `seed`. Raises DataError naming file and line,
    OpeningError for a prompt that the environment refuses.
    """
    records, lines = read_json(path, spelled=True)
    config, whole = PromptSourceConfig(kind="jsonl", path=str(path)), sys.maxsize
    source = FileSource(config, path, records, lambda row: f"{path}:{lines[row]}", takes_tokens=True)
    stream = PromptStream(source, tokenizer, seed=seed, shuffle=False, chat=chat, system=None, max_prompt_tokens=whole,
                          long_prompts="error", env=env)  # fmt: skip
    prompts = stream.next_batch(len(records))
    return [replace(prompt, dataset_id=f"{path}:{line}") for prompt, line in zip(prompts, lines, strict=True)]


def env_seed(seed: int, prompt_id: int) -> int:
    """The seed of a prompt's environments, 31 bits, in a stream with this seed."""
    return hashed("env", seed, prompt_id) >> _SEED_SHIFT


def open_source(config: PromptSourceConfig, path: str, seed: int, system: str | None = None) -> Source:
    """The configured source; `path` names its section in errors, `system` is the run's system message. Raises
    ConfigError and DataError.

    Imports only the library that this source needs: each takes about a second.
    """
    if config.kind == "env":
        return EnvSource(seed)
    if config.kind == "tasks":
        from megatron_tlt.data.tasks import TaskSource

        return TaskSource(config.tasks, seed, f"{path}.tasks")
    assert config.path is not None, "config/checks requires it"
    return open_file(config, Path(config.path), system)


def first_row(source: Source) -> Row:
    """The first row that can be drawn. Raises DataError, also where none of the first rows can."""
    return first_drawn(source.row, _MOST_DROPS_IN_A_ROW, UndrawnRowError)


def source_problems(
    config: PromptSourceConfig,
    field: str,
    render: Callable[[str | Messages, Sequence[dict[str, Any]]], object] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    system: str | None = None,
    compare: Callable[[str, Iterable[tuple[str, Answer | None]]], list[ConfigProblem]] = lambda *_: [],
) -> list[ConfigProblem]:
    """Why the source of section `field` cannot be read, with file and line; empty if it can.

    `render` puts a prompt into the chat template: it gets one of each form, and its tools, else the environment's
    `tools`. `system`: the run's system message. `compare`: gets the field and the answers, returns their problems.
    """
    try:
        source = open_source(config, field, 0, system)
        if render is not None and isinstance(source, FileSource):
            for where, prompt, own in source.examples:
                with errors_at(where):
                    render(prompt, own or tools)
        return compare(field, source.answers())
    except ConfigError as error:
        return error.problems
    except DataError as error:
        return [ConfigProblem(f"{field}.path", config.path, str(error))]
    except re.error:  # of answer_pattern, which config/checks names
        pass
    return []


class PromptStream:
    """Rows of a source, shuffled anew each epoch if finite, tokenized; those that are too long as `long_prompts` says.
    An item that its generator cannot draw is dropped.

    Every rank computes them alike.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: HFTokenizer,
        *,
        seed: int,
        shuffle: bool,
        chat: bool,
        system: str | None,
        max_prompt_tokens: int,
        long_prompts: LongPrompts,
        once: bool = False,
        env: EnvPrompts = NO_ENV,
    ):
        """`once`: a finite source is read once."""
        self._source, self._tokenizer, self._seed = source, tokenizer, seed
        self._shuffle = shuffle and source.size is not None
        self._chat, self._system = chat and tokenizer.has_chat_template, system
        self._max_prompt_tokens, self._long_prompts = max_prompt_tokens, long_prompts
        self._once, self._env = once, env
        self._draws = 0  # rows taken from the source, also dropped ones
        self._next_id = 0  # prompts returned
        self._dropped = 0  # rows in this epoch; of an infinite source: since the last line of the log
        self._undrawn = ""  # the last one that could not be drawn, and why
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, permutation)
        self._texts: dict[int, str | None] = {}  # of the environment, by prompt id: those that only `peek` has used
        self._is_peek = False  # a copy that looks ahead: without lines in the log

    @property
    def _epoch(self) -> int:
        """Full passes over a finite source so far; 0 for an infinite one."""
        return self._draws // self._source.size if self._source.size else 0

    @property
    def repeats(self) -> bool:
        """Whether prompts come again, in each epoch of a finite source. An infinite one has each row once."""
        return self._source.size is not None

    @property
    def has_openings(self) -> bool:
        """Whether the environment adds texts to prompts, for which all ranks ask together."""
        return self._env.openings is not None

    @property
    def fingerprint(self) -> str:
        """Of the rows and their order."""
        return digest(self._source.fingerprint, self._shuffle, self._seed if self._shuffle else "")

    def next_batch(self, n: int) -> list[Prompt]:
        """The next n prompts; fewer once a held-out file is used up. Moves the position. Raises PromptError,
        OpeningError: on every rank, which take the same prompts.
        """
        try:
            return self._next_batch(n)
        except DataError as error:
            raise PromptError(str(error)) from error

    def _next_batch(self, n: int) -> list[Prompt]:
        """`next_batch` as one rank alone may call it. Raises DataError, OpeningError."""
        prompts: list[Prompt] = []
        drops = 0
        while len(prompts) < n and (drawn := self._draw(n - len(prompts))):
            opened = self._opened(drawn)
            prompts += opened
            drops = 0 if opened else drops + len(drawn)
            if drops > _MOST_DROPS_IN_A_ROW:
                raise self._none_fits("prompt with the environment's text")
        if drops and not prompts:
            raise self._none_fits("prompt with the environment's text")
        if len(prompts) < n and not self._is_peek:
            _log.info("%s: only %d prompts left of %d requested", self._source.description, len(prompts), n)
        return prompts

    def peek(self, n: int) -> list[Prompt]:
        """What `next_batch(n)` would return, without moving the position. Raises DataError, OpeningError.

        It keeps the environment's texts, so that each prompt is opened once. Mutates these only.
        """
        ahead = copy(self)  # shares source and tokenizer, which have no position, and the texts
        ahead._is_peek = True
        return ahead._next_batch(n)

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able."""
        return {
            "draws": self._draws,
            "next_id": self._next_id,
            "fingerprint": self.fingerprint,
            "source": self._source.description,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position. Raises DataError when it belongs to other data."""
        if state.get("fingerprint") != self.fingerprint:
            raise DataError(
                f"the saved data position belongs to other prompts (or another seed or order): saved "
                f"{state.get('source')} [{state.get('fingerprint')}], configured {self._source.description} "
                f"[{self.fingerprint}]. Resume with the same data, or start a new run: another train.run_dir, or "
                "checkpoint.resume=never (`megatron-tlt export` keeps the weights of this one)"
            )
        self._draws, self._next_id, self._dropped = state["draws"], state["next_id"], 0

    def _draw(self, n: int) -> list[tuple[Row, Prompt]]:
        """The next n rows whose prompts fit, fewer at the end of a source that is read once."""
        drawn: list[tuple[Row, Prompt]] = []
        while len(drawn) < n and (following := self._next()) is not None:
            drawn.append(following)
        return drawn

    def _opened(self, drawn: Sequence[tuple[Row, Prompt]]) -> list[Prompt]:
        """The prompts with the environment's texts, without those that are now too long. Raises DataError,
        OpeningError.
        """
        prompts = [prompt for _, prompt in drawn]
        opened = []
        for (row, prompt), text in zip(drawn, self._openings(prompts), strict=True):
            if not text and isinstance(self._source, EnvSource):
                raise OpeningError(f"{row.dataset_id}: the environment's reset returned no text, which is the prompt")
            check_text(text, "reset", row.dataset_id)
            whole = row.with_opening(text) if text else row
            tokens = self._encode(whole) if text else prompt.token_ids
            if tokens is not None:
                row_text = prompt.text if text else None
                opened.append(replace(prompt, text=whole.prompt, row_text=row_text, token_ids=tokens))
        return opened

    def _openings(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The environment's texts. Mutates those that are kept."""
        if self._env.openings is None:
            return [None] * len(prompts)
        new = [prompt for prompt in prompts if prompt.prompt_id not in self._texts]
        if new:
            self._texts.update(zip((prompt.prompt_id for prompt in new), self._env.openings(new), strict=True))
        text_of = self._texts.__getitem__ if self._is_peek else self._texts.pop
        return [text_of(prompt.prompt_id) for prompt in prompts]

    def _next(self) -> tuple[Row, Prompt] | None:
        """None at the end of a source that is read once."""
        for _ in range(self._source.size or _MOST_DROPS_IN_A_ROW):
            if self._once and self._epoch:
                break
            row = self._drawn_row()
            tokens = None if row is None else self._encode(row)
            self._log_dropped()
            if row is None or tokens is None:
                continue
            prompt_id, self._next_id = self._next_id, self._next_id + 1
            return row, Prompt(
                prompt_id,
                row.dataset_id,
                tokens,
                row.prompt,
                row.answer,
                row.task,
                dict(row.metadata),
                env_seed(self._seed, prompt_id),
            )
        if self._once and self._epoch and self._next_id:
            return None
        raise self._none_fits("prompt")

    def _drawn_row(self) -> Row | None:
        """The next row; None where it is dropped, because it cannot be drawn."""
        number, self._draws = self._row_number(self._draws), self._draws + 1
        try:
            return self._source.row(number)
        except UndrawnRowError as error:
            self._dropped += 1
            if not self._undrawn and not self._is_peek:
                _log.warning("%s; items that cannot be drawn are dropped", error)
            self._undrawn = str(error)
            return None

    def _none_fits(self, what: str) -> DataError:
        limit = f"data.max_prompt_tokens = {self._max_prompt_tokens}"
        undrawn = self._undrawn and f" and can be drawn (last: {self._undrawn})"
        return DataError(f"{self._source.description}: no {what} fits into {limit}{undrawn}")

    def _row_number(self, draw: int) -> int:
        size = self._source.size
        if size is None:
            return draw
        epoch, place = divmod(draw, size)
        if not self._shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(size)
        return int(self._order[1][place])

    def _encode(self, row: Row) -> tuple[int, ...] | None:
        """The row's tokens; None where it is dropped. Raises DataError where a long one is an error."""
        limit, where = self._max_prompt_tokens, row.place or row.dataset_id
        with errors_at(where):
            tokens = encode_row(self._tokenizer, row, self._chat, self._system, self._env.tools)
            if len(tokens) > limit and self._long_prompts == "error":
                why = f"data.max_prompt_tokens allows {limit} with data.long_prompts = error"
                raise DataError(f"the prompt has {len(tokens)} tokens, {why}")
        if len(tokens) > limit and self._long_prompts == "drop":
            self._dropped += 1
            return None
        return tuple(tokens[-limit:])

    def _log_dropped(self) -> None:
        """Says once an epoch, or every so many rows of an infinite source, how many of them were dropped."""
        every = self._source.size or _MOST_DROPS_IN_A_ROW
        if self._dropped and self._draws % every == 0 and not self._is_peek:
            why = f"data.max_prompt_tokens = {self._max_prompt_tokens}"
            why += self._undrawn and f" or could not be drawn (last: {self._undrawn})"
            _log.info("%s: of the last %d rows, %d exceed %s: dropped", self._source.description, every, self._dropped,
                      why)  # fmt: skip
            self._dropped = 0


def encode_row(
    tokenizer: HFTokenizer, row: Row, chat: bool, system: str | None, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Token ids of a row's prompt, as `encode_prompt` does, with the row's tools or else the environment's `tools`.

    Raises DataError, also for a row with tools beside those of an environment.
    """
    if row.token_ids is not None:
        return tokenizer.checked([*row.token_ids])
    if row.tools and tools:
        names = shortened([tool["function"]["name"] for tool in tools])
        raise DataError(f"field {TOOLS!r}: the environment has tools of its own ({names}): leave the column out")
    shown = row.tools or (tools if chat else ())  # `TurnTokens` refuses those of an environment without a template
    return encode_prompt(tokenizer, row.messages or row.prompt, chat, system, shown)


def encode_prompt(
    tokenizer: HFTokenizer,
    prompt: str | Messages,
    chat: bool,
    system: str | None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Token ids of a prompt; `chat`: in the tokenizer's chat template, after the message `system`, with `tools`; else
    behind the tokens that the tokenizer puts before a text (BOS). A string without the template may be rendered
    already: `tools` are left out.

    Raises DataError for several messages, or tools beside one, without the template, and for a token beyond the model's
    embedding.
    """
    if chat:
        return tokenizer.encode_chat(prompt, system, tools)
    if not isinstance(prompt, str):
        needed = (
            "need data.chat_template and a tokenizer with a chat template (sft: sft.chat_template, generate: --chat)"
        )
        if tools:
            raise DataError(f"field {TOOLS!r}: {len(tools)} tools {needed}")
        if len(prompt) > 1:
            raise DataError(f"{len(prompt)} chat messages {needed}")
        prompt = last_user_text(prompt)
    return tokenizer.encode_prompt(prompt)

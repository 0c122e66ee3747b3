"""A Hugging Face tokenizer from a local directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_tlt.config.json_reader import read_object_if_there
from megatron_tlt.data.chat import Messages, with_system
from megatron_tlt.data.chat_template import ChatTemplate, TemplateSettings
from megatron_tlt.data.hashing import stamp
from megatron_tlt.errors import CheckpointError, DataError

# Names of a tokenizer's files of any version of the library: those with tokens, and all of them, templates included.
_VOCABULARY = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
TOKENIZER_FILES = (
    *_VOCABULARY, "tokenizer*", "tekken.json", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates",
)  # fmt: skip
_opened: dict[str, HFTokenizer] = {}  # the last one


class HFTokenizer:
    """The part of a tokenizer that engines, prompts and fine-tuning use. Nothing is downloaded."""

    def __init__(self, path: str | Path, rows: int | None = None, template: TemplateSettings | None = None):
        """Reads the tokenizer's files in `path`. Raises CheckpointError.

        `rows`: of the model's embedding. Encoding then raises DataError for a text with a token beyond them.
        `template`: for its chat template.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory (a tokenizer is read from local files)")
        try:
            self._tokenizer = _open(directory)
        except Exception as error:  # `tokenizers` has no class of its own for a damaged file
            raise CheckpointError(f"{directory}: no usable tokenizer: {error}") from error
        # Of configurations alone, and of files of another class, `transformers` makes an empty one.
        if not has_tokenizer(directory):
            raise CheckpointError(f"{directory}: no tokenizer files (tokenizer.json or its older kinds)")
        if self.vocabulary().keys() <= self.added_tokens:
            raise CheckpointError(f"{directory}: no usable tokenizer: its vocabulary has added tokens only")
        own = self._tokenizer.eos_token_id
        self._eos = tuple(dict.fromkeys([*_ends_in(directory), *([] if own is None else [own])]))
        if not self._eos:
            raise CheckpointError(f"{directory}: neither configuration nor tokenizer names an end of sequence")
        self._begin = _begin_ids(directory, self._tokenizer)
        # SentencePiece's "\u2581a": the beginning of a text has a mark that the same text within another one lacks.
        self._marks_beginning = self._tokenizer.convert_ids_to_tokens(self._bare_ids("a")) != ["a"]
        self._rows = rows
        self.template = ChatTemplate.read(directory, self._tokenizer.special_tokens_map, template or TemplateSettings())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: of generation_config.json and config.json, then the tokenizer's own."""
        return self._eos

    @property
    def end_token_id(self) -> int:
        """The tokenizer's own end of sequence, which ends a text without chat template."""
        own: int | None = self._tokenizer.eos_token_id
        return self._eos[0] if own is None else own

    @property
    def vocab_size(self) -> int:
        """Tokens with added ones; a model's embedding may have more rows."""
        return len(self._tokenizer)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones included."""
        tokens: dict[str, int] = self._tokenizer.get_vocab()
        return tokens

    @cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry. Kept: `vocabulary` makes a dictionary in each call."""
        return max(map(len, self.vocabulary()), default=1)

    def token(self, number: int) -> str:
        """The token with this id, for messages."""
        return str(self._tokenizer.convert_ids_to_tokens(number))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self.template is not None

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template reads `tools`. Raises CheckpointError for one that cannot be used."""
        return self.template is not None and "tools" in self.template.variables()

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None for any other text."""
        return self._tokenizer.convert_tokens_to_ids(text) if text in self.special_tokens else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that `encode` reads as one token with a meaning of its own, longest first."""
        added = [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]  # Llama 3 names few others
        return tuple(sorted({*self._tokenizer.all_special_tokens, *added}, key=lambda text: (-len(text), text)))

    def special_token_in(self, text: str) -> str | None:
        """The first special token in a text; None without one."""
        found = self._special_pattern.search(text)
        return None if found is None else found[0]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")  # which is nowhere

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of `special_tokens`."""
        return frozenset(self._tokenizer.convert_tokens_to_ids([*self.special_tokens]))

    @property
    def special_roles(self) -> dict[int, str]:
        """The roles of special tokens that must have a row in the embedding, by id."""
        named = {getattr(self._tokenizer, f"{role}_id"): role for role in ("pad_token", "bos_token", "eos_token")}
        return {i: role for i, role in {**dict.fromkeys(self._eos, "eos_token_id"), **named}.items() if i is not None}

    @property
    def added_tokens(self) -> frozenset[str]:
        """Tokens that were added to the vocabulary, special ones included."""
        return frozenset(map(str, self._tokenizer.added_tokens_decoder.values()))

    @property
    def tokens_beyond(self) -> list[str]:
        """Tokens that have no row in the model's embedding, by id."""
        ids = {} if self._rows is None else {t: i for t, i in self.vocabulary().items() if i >= self._rows}
        return sorted(ids, key=lambda token: ids[token])

    @property
    def name(self) -> str:
        """Its directory, for messages."""
        return str(self._tokenizer.name_or_path)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens added. Raises DataError for a token beyond the embedding."""
        return self.checked(self._bare_ids(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt without chat template. Raises as `encode` does.

        The tokens that the tokenizer puts before a text (BOS) come once, also where the text begins with them; those
        that it puts behind one (EOS) are left out.
        """
        ids = self.encode(text)
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def encode_behind(self, before: str, text: str) -> list[int]:
        """Token ids of `text` as they are behind `before`, whose own tokens stay as they are. Raises as `encode` does.

        Where a token would span both, `text` is encoded behind another text: behind nothing it would get the mark of a
        beginning. A tokenizer without such a mark encodes `text` alone.
        """
        if self._marks_beginning:
            for context in (before, "\n", "."):
                ids, whole = self._bare_ids(context), self._bare_ids(context + text)
                if ids and whole[: len(ids)] == ids:
                    return self.checked(whole[len(ids) :])
        return self.encode(text)

    def checked(self, ids: list[int]) -> list[int]:
        """`ids`. Raises DataError for one without a row in the model's embedding."""
        rows = self._rows
        wrong = next((i for i in ids if not 0 <= i < rows), None) if rows is not None else None
        if wrong is None:
            return ids
        is_token = 0 <= wrong < self.vocab_size
        name = f"the token {self.token(wrong)!r} with id {wrong}" if is_token else f"token id {wrong}"
        raise DataError(f"{name} has no row in the model's embedding of {rows} rows")

    def _bare_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_chat(
        self, prompt: str | Messages, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of the chat template around messages (a string: one of the user), open for the response.

        `system`: see `with_system`; `tools`: JSON schemas of functions. Raises CheckpointError without a template,
        DataError for messages that it refuses, fails on or leaves out.
        """
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        text = self.render_chat(with_system(messages, system), tools)
        return self.checked(self._bare_ids(text))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text of which `encode_chat` encodes the tokens. Raises as it does."""
        return self._rendered(messages, tools, is_open=True)

    def render_closed(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation that ends with its last message. Raises as `encode_chat` does."""
        return self._rendered(messages, (), is_open=False)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]], *, is_open: bool
    ) -> str:
        if self.template is None:
            raise CheckpointError(f"{self.name}: the tokenizer has no chat template")
        return self.template.render(messages, tools, is_open)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def read_tokenizer(directory: Path, rows: int | None, template: TemplateSettings) -> HFTokenizer:
    """The tokenizer in `directory`, read again only where its files have changed: a large one takes seconds.

    Raises as `HFTokenizer` does.
    """
    files = [*directory.glob("*"), *directory.glob("additional_chat_templates/*")]
    key = repr((directory.absolute(), rows, template, stamp(files)))
    if key not in _opened:
        tokenizer = HFTokenizer(directory, rows, template)
        _opened.clear()
        _opened[key] = tokenizer
    return _opened[key]


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has a file with the name of a Hugging Face vocabulary. Imports no `transformers`."""
    return any(any(directory.glob(name)) for name in _VOCABULARY)


def _open(directory: Path) -> Any:
    """The tokenizer of tokenizer.json as the file describes it; of older files alone as their class builds it.

    `AutoTokenizer` of transformers 5 takes only vocabulary and merges of tokenizer.json where the class that it chooses
    has an `__init__` (GPT2Tokenizer, Qwen2Tokenizer, LlamaTokenizer): normalizer and pre-tokenizer are the class's own,
    and so are special tokens that no file names. Models are trained with the ids of the file, which transformers 4 and
    vLLM with it compute; of BOS see `_begin_ids`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds

    kind = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    return kind.from_pretrained(str(directory), local_files_only=True)


def _begin_ids(directory: Path, tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text: those of its post-processor, else BOS where
    tokenizer_config.json has `add_bos_token: true` (DeepSeek-R1-Distill-Qwen), which transformers 5 leaves unread.
    """
    bare, whole = (tokenizer.encode("a 1.", add_special_tokens=added) for added in (False, True))
    begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    if not begin and read_object_if_there(directory / "tokenizer_config.json").get("add_bos_token") is True:
        return [number for number in (tokenizer.bos_token_id,) if number is not None]
    return list(whole[:begin])


def _ends_in(directory: Path) -> list[int]:
    """`eos_token_id` of the files that are there. Raises CheckpointError for what is no token id."""
    found: list[int] = []
    for file in (directory / "generation_config.json", directory / "config.json"):
        value = read_object_if_there(file).get("eos_token_id")
        ids = [*value] if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and number >= 0 for number in ids):
            allowed = "must be a token id (0, 1, ..), a list of them, or null"
            raise CheckpointError(f"{file}: eos_token_id = {value!r} {allowed}")
        found += ids
    return found


def end_tokens(model: str | Path, tokenizer: HFTokenizer | None, stop: Sequence[str] = ()) -> list[int]:
    """The tokens that end a response: those of the files in the directory `model` and of the tokenizer, which may be
    another directory's, and the special tokens among the strings `stop`. Raises CheckpointError.
    """
    ends = {*_ends_in(Path(model))}
    if tokenizer is not None:
        special = (tokenizer.special_id(text) for text in stop)
        ends.update(tokenizer.eos_token_ids, (token for token in special if token is not None))
    return sorted(ends)

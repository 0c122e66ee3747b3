"""A Hugging Face tokenizer from a local directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_tlt.data.chat import Messages, with_system
from megatron_tlt.data.chat_template import ChatTemplate, TemplateSettings
from megatron_tlt.errors import CheckpointError

_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")  # of any version of the library


class HFTokenizer:
    """The part of a tokenizer that engines, prompts and fine-tuning use. Nothing is downloaded."""

    def __init__(self, path: str | Path, template: TemplateSettings | None = None):
        """Reads the tokenizer's files in `path`; `template`: for its chat template. Raises CheckpointError."""
        from transformers import AutoTokenizer  # seconds, which `megatron-tlt check` does not need

        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory (a tokenizer is read from local files)")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory}: no usable tokenizer: {error}") from error
        if not has_tokenizer(directory):  # of config.json alone `transformers` makes an empty one
            raise CheckpointError(f"{directory}: no tokenizer files (tokenizer.json or its older kinds)")
        self._eos = _eos_ids(directory, self._tokenizer)
        tokens = self._tokenizer.special_tokens_map
        self._template = ChatTemplate.read(directory, template, tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: of generation_config.json (else config.json), then the tokenizer's own."""
        return self._eos

    @property
    def vocab_size(self) -> int:
        """Tokens with added ones; a model's embedding may have more rows."""
        return len(self._tokenizer)

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones included."""
        tokens: dict[str, int] = self._tokenizer.get_vocab()
        return tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._template is not None

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None for any other text."""
        return self._tokenizer.convert_tokens_to_ids(text) if text in self.special_tokens else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that `encode` reads as one token with a meaning of its own, longest first."""
        added = [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]  # Llama 3 names few others
        return tuple(sorted({*self._tokenizer.all_special_tokens, *added}, key=lambda text: (-len(text), text)))

    @property
    def name(self) -> str:
        """Its directory, for messages."""
        return str(self._tokenizer.name_or_path)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens added."""
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
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text of which `encode_chat` encodes the tokens. Raises as it does."""
        if self._template is None:
            raise CheckpointError(f"{self.name}: the tokenizer has no chat template")
        return self._template.render(messages, tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has a file with a name of a Hugging Face tokenizer's files. Imports no `transformers`."""
    return any(any(directory.glob(name)) for name in _FILES)


def _eos_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not found and (directory / name).is_file():
            try:
                value = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
            except ValueError as error:
                raise CheckpointError(f"{directory / name}: not JSON: {error}") from error
            found = [] if value is None else [value] if isinstance(value, int) else list(value)
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if not found:
        raise CheckpointError(f"{directory}: neither configuration nor tokenizer names an end of sequence")
    return tuple(dict.fromkeys(found))

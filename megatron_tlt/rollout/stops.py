"""Stop strings: found while tokens arrive, by decoding only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.interfaces import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoders write for a character whose bytes have not all come


class StopStringWatcher:
    """Watches one answer. Decodes a short window a token (constant work), never the whole answer."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        assert all(stops), "empty stop strings are refused at submission"
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(len(s) for s in stops)
        self._tokens: list[int] = []
        # Tokens before `_read` are in `_text`; decoding starts at `_window`, one piece earlier, because a
        # tokenizer may write a token differently at the start of a text.
        self._window = 0
        self._read = 0
        self._text = ""
        self._end: int | None = None

    def push(self, token_id: int) -> bool:
        """Takes the next token; true when a stop string is complete. Mutates the watcher."""
        self._tokens.append(token_id)
        known = self._tokenizer.decode(self._tokens[self._window : self._read])
        text = self._tokenizer.decode(self._tokens[self._window :])
        if text.endswith(_INCOMPLETE):
            new = text[len(known) :].rstrip(_INCOMPLETE)
            return self._find(self._text + new, len(self._text))
        start = len(self._text)
        self._text += text[len(known) :]
        self._window, self._read = self._read, len(self._tokens)
        return self._find(self._text, start)

    @property
    def cut_text(self) -> str | None:
        """The answer up to and including the stop string; None before one came."""
        return None if self._end is None else self._text[: self._end]

    def _find(self, text: str, new_from: int) -> bool:
        """Looks where a stop string can end in the new part; the one that ends first wins."""
        start = max(0, new_from - self._longest + 1)
        ends = [at + len(stop) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        if not ends:
            return False
        self._text, self._end = text, min(ends)
        return True

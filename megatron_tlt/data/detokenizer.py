"""Text of a response token by token, at a cost that does not grow with the response. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.data.tokenizer import HFTokenizer

_INCOMPLETE = "\ufffd"  # written by decoders for a character that lacks bytes


class IncrementalDecoder:
    """Decodes one response as its tokens come.

    Only the last tokens are decoded again: those of the text that came last, which decide how the next one is joined
    (leading spaces), and those whose bytes are not yet whole characters.
    """

    def __init__(self, tokenizer: HFTokenizer):
        self._tokenizer = tokenizer
        self._last: list[int] = []
        self._done = 0  # how many of the last tokens have had their text returned
        self._held = ""

    @property
    def held(self) -> str:
        """The whole characters that wait because an unfinished one follows them."""
        return self._held

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; the text with an unfinished character is held back."""
        self._last.extend(token_ids)
        before = self._tokenizer.decode(self._last[: self._done])
        text = self._tokenizer.decode(self._last)
        new = text[len(before) :]
        if not new or text.endswith(_INCOMPLETE):
            self._held = new.rstrip(_INCOMPLETE)
            return ""
        self._last, self._done = self._last[self._done :], len(self._last) - self._done
        self._held = ""
        return new

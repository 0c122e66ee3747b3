"""Text of a response token by token, at a cost that does not grow with the response. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.data.tokenizer import HFTokenizer

_INCOMPLETE = "\ufffd"  # written by decoders for a character that lacks bytes
_LONGEST = 4  # tokens of one character, which has as many bytes


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
            final = self._final_part(before, text)
            self._held = new[len(final) :].rstrip(_INCOMPLETE)
            return final
        self._last, self._done = self._last[self._done :], len(self._last) - self._done
        self._held = ""
        return new

    def _final_part(self, before: str, text: str) -> str:
        """What is certain of a long run of tokens without text, or of broken bytes: they are not decoded again. Empty
        for a short one. `before` and `text`: of the tokens done, and of all.
        """
        end = len(self._last) - _LONGEST
        if end <= self._done + _LONGEST:
            return ""
        so_far = self._tokenizer.decode(self._last[:end])
        if not text.startswith(so_far):  # its last character goes on
            return ""
        if so_far == before:  # the tokens with text still decide how the next one is joined
            del self._last[self._done : end]
            return ""
        self._last, self._done = self._last[self._done :], end - self._done
        return so_far[len(before) :]

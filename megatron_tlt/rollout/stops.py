"""Stop strings, found while tokens arrive: each token is decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_tlt.data.detokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from megatron_tlt.data.tokenizer import HFTokenizer


class StopStringFinder:
    """Finds the stop strings of one response; work per token does not grow with the response's length."""

    def __init__(self, tokenizer: HFTokenizer, stops: Sequence[str]):
        assert all(stops), "empty stop strings are refused at submission"
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = tuple(stops)
        self._stop_ids = {tokenizer.special_id(stop) for stop in stops}  # texts lack special tokens
        self._longest = max(len(s) for s in stops)
        self._text = ""
        self._end: int | None = None

    def push(self, token_id: int) -> bool:
        """Adds the next token; true when a stop string is complete. Mutates."""
        start = len(self._text)
        self._text += self._decoder.add([token_id])
        if token_id in self._stop_ids:
            self._text += self._decoder.held
            self._end = len(self._text)
            return True
        # Characters that the decoder holds back until the next one is complete cannot change: a stop may end in them.
        return self._find(self._text + self._decoder.held, start)

    @property
    def cut_text(self) -> str | None:
        """The response up to and including the stop string; None before one was found."""
        return None if self._end is None else self._text[: self._end]

    def _find(self, text: str, new_from: int) -> bool:
        """Whether a stop string ends in the new part; the one that ends first counts. Mutates text and end."""
        start = max(0, new_from - self._longest + 1)
        ends = [at + len(stop) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        if not ends:
            return False
        self._text, self._end = text, min(ends)
        return True

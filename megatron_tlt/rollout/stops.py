"""Stop strings, found while tokens arrive: each token is decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_tlt.data.detokenizer import IncrementalDecoder
from megatron_tlt.errors import BackendError

if TYPE_CHECKING:
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.types import SamplingParams


def with_stop_ids(params: SamplingParams, tokenizer: HFTokenizer | None) -> SamplingParams:
    """`params` in which a stop string that is a special token has become a stop token: texts of responses lack it.

    Raises BackendError for stop strings without a tokenizer.
    """
    if not params.stop:
        return params
    if tokenizer is None:
        raise BackendError(f"stop strings {params.stop!r} need a tokenizer, the engine has none")
    ids = {stop: tokenizer.special_id(stop) for stop in params.stop}
    special = [token for token in ids.values() if token is not None]
    strings = tuple(stop for stop, token in ids.items() if token is None)
    return replace(params, stop=strings, stop_token_ids=(*params.stop_token_ids, *special))


def stop_end(text: str, stops: Sequence[str]) -> int | None:
    """The end of the stop string in `text` that ends first; None without one."""
    return min((at + len(stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


class StopStringFinder:
    """Finds the stop strings of one response; work per token does not grow with the response's length."""

    def __init__(self, tokenizer: HFTokenizer, stops: Sequence[str]):
        assert all(stops), "empty stop strings are refused at submission"
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = tuple(stops)
        self._keep = max(len(s) for s in stops) - 1  # characters in which a stop string may have begun
        self._tail = ""  # the last of them
        self._pieces: list[str] = []  # of the response's text
        self.cut_text: str | None = None  # the response up to and including the stop string, once it was found

    def push(self, token_id: int) -> bool:
        """Adds the next token; true when a stop string is complete, the one that ends first. Mutates."""
        new = self._decoder.add([token_id])
        # Characters that the decoder holds back until the next one is complete cannot change: a stop may end in them.
        text = self._tail + new + self._decoder.held
        end = stop_end(text, self._stops)
        if end is not None:
            before = "".join(self._pieces)
            self.cut_text = before[: len(before) - len(self._tail)] + text[:end]
            return True
        if new:
            self._pieces.append(new)
            known = self._tail + new
            self._tail = known[max(0, len(known) - self._keep) :]
        return False

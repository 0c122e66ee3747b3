"""Stop strings end a response at the token that completes them, and its text right behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_tlt.errors import BackendError
from megatron_tlt.rollout.request import Request
from megatron_tlt.rollout.stops import StopStringFinder
from megatron_tlt.types import SamplingParams
from tests.helpers.fake_decoder import CharTokenizer, fake_engine
from tests.helpers.stepping import run_out


class ByteTokenizer(CharTokenizer):
    """Token i is the i-th byte: characters span tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode(errors="replace")


class WordTokenizer(CharTokenizer):
    """Drops the first word's space, as SentencePiece does: a token's text depends on what is before."""

    words = (" the", " end", "ing", ".\nStop", " here")

    def decode(self, token_ids) -> str:
        return "".join(self.words[i] for i in token_ids).removeprefix(" ")


def test_a_special_token_is_a_stop_token_and_needs_no_text_of_each_token() -> None:
    engine = fake_engine(eos=())
    params = SamplingParams(max_tokens=100, seed=2)
    (plain,) = engine.add([1, 2, 3], params, 0, indices=[0])
    run_out(engine)
    (request,) = engine.add([1, 2, 3], replace(params, stop=("<end>", "xyz")), 0, indices=[0])
    assert request.stop_token_ids == {0} and request.params.stop == ("xyz",)
    run_out(engine)
    assert (request.output, request.finish_reason) == (plain.output[: plain.output.index(0) + 1], "stop")
    assert engine.text_of(request) == CharTokenizer().decode(request.output)
    assert engine.add([1], replace(params, stop=("<end>",)), 0, indices=[0])[0].stop_strings is None


def test_a_finders_texts_do_not_grow_with_the_response() -> None:
    finder = StopStringFinder(CharTokenizer(), ["xyz", "!?"])
    assert not any(finder.push(1 + i % 20) for i in range(10_000))
    texts = [text for held in vars(finder).values() for text in (held if isinstance(held, list) else [held])]
    assert max(len(text) for text in texts if isinstance(text, str)) <= 3


def watch(tokenizer: CharTokenizer, tokens: list[int], *stops: str) -> tuple[int | None, str | None]:
    """(tokens taken when a stop string came, the cut text)."""
    watcher = StopStringFinder(tokenizer, stops)
    for count, token in enumerate(tokens, 1):
        if watcher.push(token):
            return count, watcher.cut_text
    return None, watcher.cut_text


CHARS, WORDS, BYTES = CharTokenizer(), WordTokenizer(), ByteTokenizer()


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "stops", "taken", "text"),
    [
        (CHARS, CHARS.encode("one two three"), ["two"], 7, "one two"),
        (CHARS, CHARS.encode("abcdef"), ["def", "cd"], 4, "abcd"),  # the first to end wins
        (CHARS, CHARS.encode("abcdef"), ["bcd", "cd"], 4, "abcd"),
        (WORDS, [0, 1, 2, 3, 4], [".\n"], 4, "the ending.\n"),  # it ends inside a token
        (WORDS, [4, 0, 1, 4], ["here the end"], 3, "here the end"),  # spaces depend on context
        (WORDS, [0, 1, 4], [" end here"], 3, "the end here"),
        (BYTES, BYTES.encode("abécd"), ["é"], 4, "abé"),  # characters of several bytes
        (BYTES, BYTES.encode("ab日本cd"), ["日本c"], 9, "ab日本c"),
        (BYTES, BYTES.encode("ab🙂!cd"), ["🙂!"], 7, "ab🙂!"),
        (BYTES, [*BYTES.encode("ab"), 0xE6, *BYTES.encode("c")], ["b"], 2, "ab"),  # before an unfinished one
        (CHARS, CHARS.encode("abcdef"), ["xyz"], None, None),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(tokenizer, tokens, stops, taken, text) -> None:
    assert watch(tokenizer, tokens, *stops) == (taken, text)


def run_one(params: SamplingParams, eos: tuple[int, ...] = (0,)) -> tuple[Request, str]:
    engine = fake_engine(eos=eos)
    engine.add([1, 2, 3], params, 0, indices=[0])
    (request,) = run_out(engine)
    return request, engine.text_of(request)


def test_stop_tokens_limits_and_ignore_eos():
    plain, _ = run_one(SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
    assert (len(plain.output), plain.finish_reason) == (30, "length")
    token = plain.output[12]
    at = plain.output.index(token)
    by_token, _ = run_one(SamplingParams(max_tokens=30, ignore_eos=True, seed=1, stop_token_ids=(token,)))
    assert (by_token.output, by_token.finish_reason) == (plain.output[: at + 1], "stop")
    by_eos, _ = run_one(SamplingParams(max_tokens=30, seed=1), eos=(token,))
    assert (by_eos.output, by_eos.finish_reason) == (plain.output[: at + 1], "stop")
    ignored, _ = run_one(SamplingParams(max_tokens=30, seed=1, ignore_eos=True), eos=(token,))
    assert ignored.output == plain.output
    # At the limit and at a stop token at once, the stop token is the reason.
    both, _ = run_one(SamplingParams(max_tokens=at + 1, seed=1), eos=(token,))
    assert both.finish_reason == "stop"


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(BackendError, match="need a tokenizer"):
        fake_engine(tokenizer=None).add([1], SamplingParams(stop=("x",)), 0, indices=[0])

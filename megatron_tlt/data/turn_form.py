"""What a chat template writes around a text of the assistant, found by rendering made-up conversations.

...<|im_start|>assistant\\n  4?  <|im_end|>  \\n<|im_start|>user\\n...
opening                     text  end
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError

PROMPT, TURN, OBSERVATION = "Prompt.", "made-up-turn", "Observation."
THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
_TAG = re.compile(r"\s*(<[^<>]+>)")
_CONVERSATION = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": TURN}]


@dataclass(frozen=True, slots=True)
class TurnForm:
    """`opening`: the text before a turn; `head`: what the template writes between it and the turn's text, as white
    space, an empty thought (Qwen3) or a channel's name; `strips`: whether it leaves out white space around that text.

    `end`: the tokens behind the turn's text, up to the one that ends the turn; `tail`: the text they are of, with what
    follows it in the same turn. `is_of_template`: false where the template ends no turn, and `end` is the tokenizer's
    own eos_token. `closed`: renders the made-up conversation with this text as its last turn; raises DataError.
    """

    opening: str
    head: str
    strips: bool
    end: tuple[int, ...]
    tail: str
    is_of_template: bool
    closed: Callable[[str], str]

    def rendered(self, text: str, head: str) -> str:
        """A turn's text as the template writes it behind `opening`. Thoughts that a template leaves out stay.

        `head`: the form's, or that of an earlier turn. A text with a thought or a channel of its own has that one.
        """
        if THOUGHT_END in text and (own := self._with_thought(text)) is not None:
            return own
        text = continued(text.strip() if self.strips else text, self.opening)
        tag = _TAG.match(head)
        has_own = tag is not None and text.lstrip().startswith(tag[1])
        if has_own or (THOUGHT_END in head and THOUGHT_END in text):
            head = ""
        return head + text

    def _with_thought(self, text: str) -> str | None:
        """A text with a thought as the template writes it, which may begin and space the thought otherwise; None where
        it leaves a part out, or another thought is open.
        """
        try:
            whole = self.closed(text).removesuffix(self.tail)
        except DataError:
            return None
        is_kept = self.opening and whole.startswith(self.opening) and _letters(whole).endswith(_letters(text))
        return whole.removeprefix(self.opening) if is_kept else None


def read_turn_form(tokenizer: HFTokenizer, chat: bool = True) -> TurnForm:
    """The form of `tokenizer`'s chat template; without one, or not `chat`, or where it refuses: eos_token."""
    if not (chat and tokenizer.has_chat_template):
        return TurnForm("", "", False, (tokenizer.end_token_id,), "", False, lambda text: text)

    def closed_with(text: str) -> str:
        return tokenizer.render_closed([_CONVERSATION[0], {"role": "assistant", "content": text}])

    try:
        opening = tokenizer.render_chat(_CONVERSATION[:1])
        closed = closed_with(TURN)
        strips = closed == closed_with(f" {TURN}\n")
    except DataError:
        opening, closed, strips = "", "", False
    before, found, tail = closed.partition(TURN)
    end = _end(tokenizer, before + found, tail) if found else ()
    head = head_behind(opening, before) if found else ""
    return TurnForm(opening, head, strips, end or (tokenizer.end_token_id,), tail, bool(end), closed_with)


def opens_thought(opening: str) -> bool:
    """Whether the text before a turn begins a thought, in which the model goes on."""
    return opening.rstrip().endswith(THOUGHT_BEGIN)


def continued(text: str, opening: str) -> str:
    """`text` without the beginning of a thought that `opening` ends with already."""
    if not (opens_thought(opening) and text.lstrip().startswith(THOUGHT_BEGIN)):
        return text
    space = opening.rpartition(THOUGHT_BEGIN)[2]
    return text.lstrip().removeprefix(THOUGHT_BEGIN).removeprefix(space)


def head_behind(opening: str, before: str) -> str:
    """What stands between `opening` and a turn's text, of the text `before` that. An open thought is closed empty."""
    if before.startswith(opening):
        return before.removeprefix(opening)
    return f"\n{THOUGHT_END}\n\n" if opens_thought(opening) else ""


def _letters(text: str) -> str:
    """A text without white space and the beginning of its thought."""
    return "".join(text.split()).removeprefix(THOUGHT_BEGIN)


def tokens_to_stop(tokens: list[int], stops: Collection[int]) -> tuple[int, ...]:
    """`tokens` up to the first stop token; none without one."""
    length = next((i for i, token in enumerate(tokens, 1) if token in stops), 0)
    return tuple(tokens[:length])


def _end(tokenizer: HFTokenizer, before: str, tail: str) -> tuple[int, ...]:
    """The tokens behind a turn's text up to the first stop token, else up to the first special one that ends the last
    turn and earlier ones, else up to a stop token that begins the next message.
    """
    last = tokenizer.encode_behind(before, tail)
    earlier = tokenizer.encode_behind(before, _tail_before_user(tokenizer))
    end = tokens_to_stop(last, tokenizer.special_ids)
    is_same = not earlier or end == tokens_to_stop(earlier, tokenizer.special_ids)
    stops = tokenizer.eos_token_ids
    return tokens_to_stop(last, stops) or (end if is_same else ()) or tokens_to_stop(earlier, stops)


def _tail_before_user(tokenizer: HFTokenizer) -> str:
    """The text between an earlier turn and the next message's content; empty where the template refuses one."""
    try:
        text = tokenizer.render_chat([*_CONVERSATION, {"role": "user", "content": OBSERVATION}])
    except DataError:
        return ""
    return text.partition(TURN)[2].partition(OBSERVATION)[0]

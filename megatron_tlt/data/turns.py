"""The tokens between two turns of the model: an observation in the chat template's form.

    ...<|im_start|>assistant\\n  4?<|im_end|>  \\n<|im_start|>user\\nWrong.<|im_end|>\\n<|im_start|>assistant\\n  5.
                                 drawn         given                                                             drawn

A response's tokens are only ever appended to: no drawn turn is rendered or encoded again, since other tokens may have
the same text. The given tokens are the end of a rendering of a made-up conversation, from the end of the assistant's
text on. They begin with the tokens that end a turn, unless the model has drawn a stop token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turn_form import (
    OBSERVATION,
    PROMPT,
    THOUGHT_BEGIN,
    THOUGHT_END,
    TURN,
    continued,
    head_behind,
    opens_thought,
    tokens_to_stop,
)
from megatron_tlt.errors import ConfigError, DataError

CUT_MARK = " [cut]"
_EDGE_TOKENS = 64  # before a cut in characters, whose tokens may differ from those of the whole text
_THOUGHTS = f"{THOUGHT_BEGIN}\nThought.\n{THOUGHT_END}\n\n{TURN}"


class TurnTokens:
    """Encodes observations for one tokenizer."""

    def __init__(
        self,
        tokenizer: HFTokenizer,
        *,
        chat: bool,
        max_observation_tokens: int,
        tools: Sequence[dict[str, Any]] = (),
        roles: Sequence[Literal["user", "tool"]] = ("user",),
        keep_history: bool = False,
        ends: Sequence[int] = (),
    ):
        """`chat`: by the chat template, if the tokenizer has one; `roles`: those that observations will have; `ends`:
        tokens that end turns beside the tokenizer's own.

        Raises ConfigError for a template without such a role, or one that renders earlier turns otherwise than they
        were generated (not with `keep_history`).
        """
        self._tokenizer, self._tools = tokenizer, tools
        self._chat = chat and tokenizer.has_chat_template
        self._most = max_observation_tokens
        self._ends = {*tokenizer.eos_token_ids, *ends}
        if tools and not self._chat:
            names = [tool["function"]["name"] for tool in tools]
            allowed = f"are tools, which need data.chat_template and a tokenizer with one ({tokenizer.name})"
            raise ConfigError.of("env", names, allowed)
        self._keep_history = keep_history
        self._num_end_tokens: dict[str, int] = {}  # of a turn before a message of this role
        for role in roles:
            self._check_template(role)

    @property
    def max_characters(self) -> int:
        """Characters of an observation that are read: more than its tokens that are kept can have."""
        return self.characters_of(self._most)

    def characters_of(self, num_tokens: int) -> int:
        """More characters than a text's first `num_tokens` tokens can have: cut there, a text has the same first ones.

        Each token counts as the vocabulary's longest entry, which is often a run of 64 or 128 spaces. An entry of a
        byte-level vocabulary has a letter for each byte, so it is no shorter than its text.
        """
        return (num_tokens + _EDGE_TOKENS) * self._tokenizer.longest_token

    @property
    def opens_thought(self) -> bool:
        """Whether the chat template begins the model's turn within a thought."""
        return self._chat and opens_thought(self._prompt())

    def given(self, observation: str, role: Literal["user", "tool"], drawn: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the drawn turn `drawn` (with the stop token, if one ended it) and the next one."""
        text = self._cut(observation)
        if not self._chat:
            return tuple(self._tokenizer.encode_behind(TURN, f"\n{text}\n"))
        self._check_template(role)  # an environment's step may have a role of its own
        tokens = tuple(self._tokenizer.encode_behind(*self._rendered(text, role)))
        has_ended = bool(drawn) and drawn[-1] in self._ends
        return tokens[self._num_end_tokens[role] :] if has_ended else tokens

    def opening(self, role: Literal["user", "tool"]) -> str:
        """The text before a turn that follows a message of `role`."""
        return "".join(self._rendered(OBSERVATION, role)) if self._chat else f"{OBSERVATION}\n"

    def head(self, role: Literal["user", "tool"]) -> str:
        """What the template writes between the opening of a turn and its text, before a message of `role`."""
        if not self._chat:
            return ""
        before, _ = self._rendered(OBSERVATION, role)
        return head_behind(self._prompt(), before.removesuffix(TURN))

    def _prompt(self) -> str:
        """A made-up prompt, open for the model's turn."""
        return self._tokenizer.render_chat([{"role": "user", "content": PROMPT}], self._tools)

    def _rendered(self, observation: str, role: str) -> tuple[str, str]:
        """A made-up conversation up to the end of the assistant's text, and what follows."""
        conversation = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": TURN},
            {"role": role, "content": observation},
        ]
        rendered = self._tokenizer.render_chat(conversation, self._tools)
        end = rendered.index(TURN) + len(TURN)
        return rendered[:end], rendered[end:]

    def _end(self, role: str) -> tuple[int, ...]:
        """The tokens that end a turn before a message of `role`; none where no stop token does."""
        before, behind = self._rendered(OBSERVATION, role)
        tokens = self._tokenizer.encode_behind(before, behind[: behind.index(OBSERVATION)])
        return tokens_to_stop(tokens, self._ends)

    def _cut(self, observation: str) -> str:
        text = self._without_special(observation[: self.max_characters])
        ids = self._tokenizer.encode(text)
        if len(ids) <= self._most and len(observation) <= self.max_characters:
            return text
        return self._tokenizer.decode(ids[: self._most]) + CUT_MARK

    def _without_special(self, text: str) -> str:
        """An observation must not end turns or begin messages: a space breaks the texts of special tokens."""
        for token in self._tokenizer.special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _check_template(self, role: Literal["user", "tool"]) -> None:
        """Renders conversations to find out, once a role that fits. Raises ConfigError."""
        if not self._chat or role in self._num_end_tokens:
            return
        field = "env.tool_role" if role == "tool" else "data.chat_template"
        where = f"the chat template of {self._tokenizer.name}"
        try:
            turns = (_THOUGHTS,) if self.opens_thought else (TURN, _THOUGHTS)
            rewritten = next((turn for turn in turns if self._is_rewritten(turn, role)), None)
            end = self._end(role)
        except (DataError, ValueError) as error:  # ValueError: it leaves a text out
            allowed = f"{where} has no such message after one of the assistant: {error}"
            raise ConfigError.of(field, role, allowed + ("; use 'user'" if role == "tool" else "")) from error
        if not end:
            allowed = f"{where} ends no turn of the assistant with a stop token: add its token to eos_token_id in "
            allowed += "generation_config.json, or use false, which joins texts"
            raise ConfigError.of("data.chat_template", True, allowed)
        if rewritten is not None and not self._keep_history:
            allowed = (
                f"{where} renders an earlier turn, {rewritten!r}, otherwise than it was generated, before a message of "
                f"the {role}: 'keep' trains on turns as they were generated; a template that keeps them avoids it"
            )
            raise ConfigError.of("env.rewritten_history", "refuse", allowed)
        self._num_end_tokens[role] = len(end)

    def _is_rewritten(self, turn: str, role: str) -> bool:
        """Whether a rendering with later messages does not begin with the prompt and the turns as generated, behind
        the thought that the prompt may open; the model draws white space that the template writes before a turn.
        """
        messages = [{"role": "user", "content": PROMPT}]
        for _ in range(2):
            prompt = self._tokenizer.render_chat(messages, self._tools)
            messages += [{"role": "assistant", "content": turn}, {"role": role, "content": OBSERVATION}]
            rendered = self._tokenizer.render_chat(messages, self._tools)
            drawn = continued(turn, prompt)
            if not (rendered.startswith(prompt) and rendered[len(prompt) :].lstrip().startswith(drawn)):
                return True
        return False

"""The tokens between two turns of the model: an observation in the chat template's form.

    ...<|im_start|>assistant\\n  4?<|im_end|>  \\n<|im_start|>user\\nWrong.<|im_end|>\\n<|im_start|>assistant\\n  5.
                                 drawn         given                                                             drawn

A response's tokens are only ever appended to: no drawn turn is rendered or encoded again, since other tokens may have
the same text. The given tokens are the end of a rendering of a made-up conversation, from the end of the assistant's
text on. They begin with the token that ends a turn, unless the model has drawn one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import ConfigError, DataError

CUT_MARK = " [cut]"
_EDGE_TOKENS = 64  # before a cut in characters, whose tokens may differ from those of the whole text
_PROMPT, _DRAWN, _OBSERVATION = "Prompt.", "made-up-turn", "Observation."
_THOUGHT_BEGIN = "<think>"
_THOUGHTS = f"{_THOUGHT_BEGIN}\nThought.\n</think>\n\n{_DRAWN}"


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
    ):
        """`chat`: by the chat template, if the tokenizer has one; `roles`: those that observations will have.

        Raises ConfigError for a template without such a role, or one that renders earlier turns otherwise than they
        were generated (not with `keep_history`).
        """
        self._tokenizer, self._tools = tokenizer, tools
        self._chat = chat and tokenizer.has_chat_template
        self._most = max_observation_tokens
        self._longest_token = max(map(len, tokenizer.vocabulary()), default=1)  # in characters
        if tools and not self._chat:
            names = [tool["function"]["name"] for tool in tools]
            allowed = f"are tools, which need data.chat_template and a tokenizer with one ({tokenizer.name})"
            raise ConfigError.of("env", names, allowed)
        self._keep_history = keep_history
        self._checked: set[str] = set()
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
        return (num_tokens + _EDGE_TOKENS) * self._longest_token

    @property
    def opens_thought(self) -> bool:
        """Whether the chat template begins the model's turn within a thought."""
        if not self._chat:
            return False
        opened = self._tokenizer.render_chat([{"role": "user", "content": _PROMPT}], self._tools)
        return opened.rstrip().endswith(_THOUGHT_BEGIN)

    def given(self, observation: str, role: Literal["user", "tool"], drawn: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the drawn turn `drawn` (with the stop token, if one ended it) and the next one."""
        text = self._cut(observation)
        if not self._chat:
            return tuple(self._tokenizer.encode(f"\n{text}\n"))
        self._check_template(role)  # an environment's step may have a role of its own
        tokens = self._between(text, role)
        has_ended = bool(drawn) and drawn[-1] in self._tokenizer.eos_token_ids
        return tokens[1:] if has_ended and tokens[0] in self._tokenizer.eos_token_ids else tokens

    def _between(self, observation: str, role: str) -> tuple[int, ...]:
        conversation = [
            {"role": "user", "content": _PROMPT},
            {"role": "assistant", "content": _DRAWN},
            {"role": role, "content": observation},
        ]
        rendered = self._tokenizer.render_chat(conversation, self._tools)
        return tuple(self._tokenizer.encode(rendered[rendered.index(_DRAWN) + len(_DRAWN) :]))

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
        if not self._chat or role in self._checked:
            return
        field = "env.tool_role" if role == "tool" else "data.chat_template"
        where = f"the chat template of {self._tokenizer.name}"
        try:
            rewritten = next((turn for turn in (_DRAWN, _THOUGHTS) if self._is_rewritten(turn, role)), None)
            has_end = self._between(_OBSERVATION, role)[0] in self._tokenizer.eos_token_ids
        except (DataError, ValueError) as error:  # ValueError: it leaves the assistant's text out
            allowed = f"{where} has no such message after one of the assistant: {error}"
            raise ConfigError.of(field, role, allowed + ("; use 'user'" if role == "tool" else "")) from error
        if not has_end:
            allowed = f"{where} ends no turn of the assistant with a stop token: use false, which joins texts"
            raise ConfigError.of("data.chat_template", True, allowed)
        if rewritten is not None and not self._keep_history:
            allowed = (
                f"{where} renders an earlier turn, {rewritten!r}, otherwise than it was generated, before a message of "
                f"the {role}: 'keep' trains on turns as they were generated; a template that keeps them avoids it"
            )
            raise ConfigError.of("env.rewritten_history", "refuse", allowed)
        self._checked.add(role)

    def _is_rewritten(self, turn: str, role: str) -> bool:
        """Whether a rendering with later messages does not begin with the prompt and the turns as generated."""
        messages = [{"role": "user", "content": _PROMPT}]
        for _ in range(2):
            stream = self._tokenizer.render_chat(messages, self._tools) + turn
            messages += [{"role": "assistant", "content": turn}, {"role": role, "content": _OBSERVATION}]
            if not self._tokenizer.render_chat(messages, self._tools).startswith(stream):
                return True
        return False

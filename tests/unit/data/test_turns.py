"""The tokens between turns, against a full rendering of the conversation by the chat template of each family."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.errors import ConfigError
from tests.helpers.chat_models import save_bytes

# What each family's template does with these messages, in our own words.
CHATML = """{%- if messages[0].role != 'system' %}<|im_start|>system
Help.<|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ CONTENT }}<|im_end|>
{% endif %}{%- endfor %}{{ '<|im_start|>assistant\\n' }}"""
TEMPLATES = {
    "qwen2.5": CHATML.replace("CONTENT", "m.content"),
    # Keeps thoughts behind the last message of a user only.
    "qwen3": "{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    + CHATML.replace("CONTENT", "m.content if loop.index0 > last.user else m.content.split('</think>')[-1].lstrip()"),
    "smollm2": CHATML.replace("m.role == 'tool'", "false").replace("CONTENT", "m.content"),
    "llama3": "<|begin|>{%- for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot|>{%- endfor %}"
    "{{ '<|head|>assistant<|/head|>\\n\\n' }}",
    "demo": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    "no tools": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
}
TEMPLATES["thinking"] = TEMPLATES["qwen3"].replace("assistant\\n", "assistant\\n<think>\\n")  # it opens the thought
END = {**dict.fromkeys(("qwen2.5", "qwen3", "thinking", "smollm2"), "<|im_end|>"), "llama3": "<|eot|>"}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|end|>", "<|assistant|>")


def tokenizer_of(family: str, directory: Path) -> HFTokenizer:
    """A tokenizer of bytes and special tokens, with the family's template."""
    eos = END.get(family, "<|end|>")
    others = [token for token in SPECIAL if token != eos]
    # Llama 3 names no others.
    named = {} if family == "llama3" else {"additional_special_tokens": others}
    return HFTokenizer(save_bytes(directory, TEMPLATES[family], SPECIAL, eos_token=eos, **named))


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "smollm2", "demo"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_stream_of_turns_is_what_the_template_renders(family: str, role: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family, tmp_path)
    turns = TurnTokens(tokenizer, chat=True, max_observation_tokens=99, keep_history=True)
    texts, answers = ["Two, or 3?", "Five\nit is."], ["No: 4.", "  yes "]
    (end,) = tokenizer.eos_token_ids
    for cut in (False, True):  # a turn cut by length gets the end that it lacks
        messages = [{"role": "user", "content": "One?"}]
        stream = tokenizer.encode_chat(tuple(messages))
        for text, answer in zip(texts, answers, strict=True):
            drawn = tokenizer.encode(text) + ([] if cut else [end])
            stream += [*drawn, *turns.given(answer, role, drawn)]
            messages += [{"role": "assistant", "content": text}, {"role": role, "content": answer}]
        assert tokenizer.encode_chat(tuple(messages)) == stream


@pytest.mark.parametrize("family", ["qwen3", "thinking"])
def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family, tmp_path)
    with pytest.raises(ConfigError, match=r"env\.rewritten_history") as caught:
        TurnTokens(tokenizer, chat=True, max_observation_tokens=9)
    assert str(tmp_path) in str(caught.value)
    TurnTokens(tokenizer, chat=True, max_observation_tokens=9, roles=("tool",))
    TurnTokens(tokenizer, chat=True, max_observation_tokens=9, keep_history=True)


@pytest.mark.parametrize(
    ("family", "role", "field"), [("no end", "user", "chat_template"), ("no tools", "tool", "tool_role")]
)
def test_a_template_that_cannot_continue_a_turn_is_refused(family: str, role: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=field):
        TurnTokens(tokenizer_of(family, tmp_path), chat=True, max_observation_tokens=9, roles=(role,))


def test_a_role_that_does_not_fit_is_refused_at_every_observation(tmp_path: Path) -> None:
    turns = TurnTokens(tokenizer_of("qwen3", tmp_path), chat=True, max_observation_tokens=9, roles=())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"env\.rewritten_history"):
            turns.given("Wrong.", "user", [1])


def test_an_observation_is_cut_and_cannot_end_a_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("demo", tmp_path)
    turns = TurnTokens(tokenizer, chat=True, max_observation_tokens=12)
    given = turns.given("ab<|end|>cdefghijk", "user", [])
    assert given.count(tokenizer.eos_token_ids[0]) == 2, "the turn's and the observation's"
    assert "ab< |end|>cd [cut]" in tokenizer.decode(given)
    turns = TurnTokens(tokenizer_of("llama3", tmp_path), chat=True, max_observation_tokens=99)
    assert len(turns.given("a<|head|>", "user", [])) == len(turns.given("a< |head|>", "user", []))


def test_a_template_that_opens_a_thought_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for end, opens in (("<think>\n", True), ("<think>\n\n</think>\n\n", False)):
        monkeypatch.setitem(TEMPLATES, "demo", TEMPLATES["demo"].partition("<|assistant|>")[0] + "<|assistant|>" + end)
        tokenizer = tokenizer_of("demo", tmp_path)
        assert TurnTokens(tokenizer, chat=True, max_observation_tokens=9, roles=()).opens_thought is opens
        assert not TurnTokens(tokenizer, chat=False, max_observation_tokens=9).opens_thought


def test_without_a_template_texts_are_joined(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("demo", tmp_path)
    turns = TurnTokens(tokenizer, chat=False, max_observation_tokens=9)
    assert tokenizer.decode(turns.given("ab", "user", [1])) == "\nab\n"
    with pytest.raises(ConfigError, match="are tools, which need"):
        TurnTokens(tokenizer, chat=False, max_observation_tokens=9, tools=[{"function": {"name": "f"}}])

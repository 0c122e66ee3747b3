"""How chat templates end a turn of the assistant; the templates are in our own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turn_form import read_turn_form
from tests.helpers.chat_models import save_bytes

SPECIAL = ("<end_of_text>", "<eom>", "<eot>", "<user>", "<assistant>")
FOR = "{% for m in messages %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "one": FOR + "<{{ m.role }}>{{ m.content }}<eot>{% endfor %}" + OPEN,
    "stripped": FOR + "<{{ m.role }}>\n\n{{ m.content | trim }}<eot>{% endfor %}" + OPEN,
    "line behind it": FOR + "<{{ m.role }}>{{ m.content }}<eot>\n{% endfor %}" + OPEN,
    "eos_token": FOR + "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}" + OPEN,
    "space before it": FOR + "<{{ m.role }}> {{ m.content }} {{ eos_token }}{% endfor %}" + OPEN,
    "two": FOR + "<{{ m.role }}>{{ m.content }}<eom><eot>{% endfor %}" + OPEN,
    "at the end only": FOR + "<{{ m.role }}>{{ m.content }}{% if loop.last %}<eot>{% endif %}{% endfor %}" + OPEN,
    "between turns only": FOR + "{% if not loop.first %}<eot>{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "next message": FOR + "<{{ m.role }}>{{ m.content }}{% endfor %}" + OPEN,
    "text": FOR + "{{ m.role }}: {{ m.content }}\n###\n{% endfor %}assistant:",
    "nothing": FOR + "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    "refused": "{{ raise_exception('no') }}",
    "none": None,
}


def tokenizer_of(name: str, folder: Path, stops: list[str], eos: str = "<end_of_text>") -> HFTokenizer:
    save_bytes(folder, TEMPLATES[name], SPECIAL, eos_token=eos)
    config = {"eos_token_id": [256 + SPECIAL.index(token) for token in stops]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return HFTokenizer(folder)


LLAMA = ["<end_of_text>", "<eom>", "<eot>"]


@pytest.mark.parametrize(
    ("name", "stops", "end", "is_of_template"),
    [
        ("one", LLAMA, "<eot>", True),
        ("stripped", LLAMA, "<eot>", True),
        ("line behind it", LLAMA, "<eot>", True),
        ("one", [], "<eot>", True),  # no stop token: SFT appends it all the same, and `check` warns
        ("eos_token", LLAMA[1:], "<end_of_text>", True),
        ("space before it", LLAMA, " <end_of_text>", True),
        ("two", ["<eot>"], "<eom><eot>", True),
        ("two", LLAMA, "<eom>", True),
        ("at the end only", LLAMA, "<eot>", True),
        ("between turns only", LLAMA, "<eot>", True),
        ("next message", ["<user>"], "<user>", True),
        ("text", LLAMA[1:], "<end_of_text>", False),
        ("nothing", LLAMA[1:], "<end_of_text>", False),
        ("refused", LLAMA[1:], "<end_of_text>", False),
        ("none", LLAMA[1:], "<end_of_text>", False),
    ],
)
def test_the_end_of_a_turn_is_the_templates(
    name: str, stops: list[str], end: str, is_of_template: bool, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(name, tmp_path, stops)
    form = read_turn_form(tokenizer)
    assert (list(form.end), form.is_of_template) == (tokenizer.encode(end), is_of_template)
    assert read_turn_form(tokenizer, chat=False).end == (tokenizer.end_token_id,)


def test_a_template_that_strips_or_leaves_a_space_is_followed(tmp_path: Path) -> None:
    for name, rendered in (("stripped", "\n\na"), ("space before it", "  a\n")):
        form = read_turn_form(tokenizer_of(name, tmp_path / name, LLAMA))
        assert form.rendered(" a\n", form.head) == rendered

"""The demo policy with another chat template, and tokenizers made in a test."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

DEMO_POLICY = Path(__file__).resolve().parents[2] / "assets/demo-policy"

# What each family's template does with messages and variables, in our own words.
QWEN2_5 = """{%- for m in messages %}{%- if m.role in ('user', 'system', 'assistant') and not m.tool_calls %}
{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- elif m.role == 'assistant' %}
{{- '<|assistant|>' }}{%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- '<|end|>' }}
{%- elif m.role == 'tool' %}{{- '<|user|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
QWEN3 = """{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.reasoning_content is string %}{%- set content = '<think>' + m.reasoning_content + '</think>' + content %}
{%- endif %}{%- if m.role in ('user', 'system', 'assistant', 'tool') %}{{- '<|' + m.role + '|>' + content }}{%- endif %}
{%- endfor %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"""
LLAMA3_2 = """{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}{{- 'Today: ' + date_string }}{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- if m.role in ('tool', 'ipython') and m.content is iterable %}{{- m.content | tojson }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|end|>' }}{%- endfor %}{{- '<|assistant|>' }}"""
GPT_OSS = """{{- 'Reasoning: ' + (reasoning_effort | default('medium')) }}{%- for m in messages %}
{{- '<|' + m.role + '|>' }}{%- if m.thinking %}{{- m.thinking + '|' }}{%- endif %}{{- m.content + '<|end|>' }}
{%- endfor %}{{- '<|assistant|>' }}"""
PARTS_TOO = """{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{{- part.text | trim }}{%- endfor %}{%- endif %}{%- endfor %}
{{- '<|assistant|>' }}"""
PARTS_ONLY = """{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- for part in m.content %}
{%- if part.type == 'text' %}{% generation %}{{- part.text }}{% endgeneration %}{%- endif %}{%- endfor %}
{%- endfor %}"""


def edit_json(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def chat_model(directory: Path, template: str | None, **settings: Any) -> Path:
    """A copy of the demo policy with `template`, and `settings` in tokenizer_config.json."""
    weights = "model.safetensors"
    shutil.copytree(DEMO_POLICY, directory, ignore=shutil.ignore_patterns(weights, "*.jinja"))
    (directory / weights).symlink_to(DEMO_POLICY / weights)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    edit_json(directory / "tokenizer_config.json", **settings)
    return directory


MARK = "\u2581"  # SentencePiece's space


def save_letters(folder: Path) -> None:
    """A token a small letter, and `</s>`: 27 tokens."""
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(string.ascii_lowercase)}, []))
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(str(folder))


def save_bytes(
    folder: Path, template: str | None, special: Sequence[str], merges: Sequence[tuple[str, str]] = (), **named: Any
) -> Path:
    """A token a byte, as GPT-2 writes them, and a pair of `merges`; `special` ones follow, of which `named` names some
    (`eos_token="<|end|>"`).
    """
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, **named)
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder


def remove_tokenizer(folder: Path) -> None:
    """Removes the files of `save_letters`."""
    for file in folder.glob("tokenizer*"):
        file.unlink()


def save_sentencepiece(
    folder: Path, template: str | None, scheme: str = "first", adds: str = "<s> $A", **named: Any
) -> Path:
    """SentencePiece's form, as Llama 2 and Mixtral have it: a space is part of the next word, and a text begins with
    one. `scheme`: where Metaspace puts that first one; `adds`: what the tokenizer adds to a text.
    """
    letters = ["<unk>", "<s>", "</s>", MARK, *string.printable[:95].replace(" ", ""), "\n"]
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), (MARK, "hello"), (MARK, MARK)]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme=scheme, split=False)
    raw.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme=scheme, split=False)
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in letters[:3]])
    raw.post_processor = processors.TemplateProcessing(adds, None, [("<s>", 1), ("</s>", 2)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **named}
    )
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder

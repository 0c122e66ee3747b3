"""HFTokenizer on a byte-level tokenizer made here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from megatron_tlt.data.detokenizer import IncrementalDecoder
from megatron_tlt.data.tokenizer import HFTokenizer, has_tokenizer
from megatron_tlt.errors import CheckpointError
from tests.helpers.chat_models import edit_json, save_bytes

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
TEXT = "Zwölf Boxkämpfer — 12 × 7 = 84 🙂🙃 日本語  two spaces\n"


def save(path: Path, template: str | None = TEMPLATE, eos: str | None = "<|end|>") -> Path:
    return save_bytes(path, template, ["<|user|>", "<|system|>", "<|assistant|>", "<|end|>"], eos_token=eos)


def test_round_trip_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save(tmp_path))
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, *tokenizer.eos_token_ids]) == TEXT
    assert tokenizer.vocab_size == 256 + 4


def test_eos_ids_come_from_both_configurations_then_the_tokenizer(tmp_path: Path) -> None:
    save(tmp_path)
    end = HFTokenizer(tmp_path).eos_token_ids
    assert len(end) == 1
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 7}))
    assert HFTokenizer(tmp_path).eos_token_ids == (7, *end)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, end[0]]}))
    assert HFTokenizer(tmp_path).eos_token_ids == (5, 9, end[0], 7)


@pytest.mark.parametrize("value", ["<|end|>", "2", 2.0, True, -1, [2, "3"], [[2]], {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_token_id_is_refused_with_its_file(tmp_path: Path, file: str, value: Any) -> None:
    save(tmp_path)
    (tmp_path / file).write_text(json.dumps({"model_type": "qwen2", "eos_token_id": value}))
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / file}: eos_token_id = {value!r} must be a")):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "GPT2Tokenizer"),  # SmolLM2
        ("llama", "LlamaTokenizer"),
        ("qwen2", "TokenizersBackend"),
        ("qwen2", "CodeGenTokenizer"),
        ("qwen2", None),
    ],
)
def test_ids_are_those_of_tokenizer_json_whichever_class_is_named(tmp_path: Path, family: str, kind: Any) -> None:
    """`None`: without tokenizer_config.json, where the family's class adds an <|endoftext|> of its own."""
    save_bytes(tmp_path, None, ["<|end|>", "<|pad|>"], [("\u010a", "\u010a"), ("1", "2"), ("\u0120", "1")])
    file, about = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    words = [{"type": "Digits", "individual_digits": True}, {**LEVEL, "use_regex": True}]
    form: dict[str, Any] = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": words}}
    form["normalizer"] = {"type": "NFKC"}
    if kind == "LlamaTokenizer":  # which is not taken for bytes
        words[:] = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False}]
        form["decoder"] = None
    edit_json(file, **form)
    named = {"eos_token": "<|end|>", "pad_token": "<|pad|>"} if kind else {}
    about.write_text(json.dumps({"tokenizer_class": kind, **named})) if kind else about.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "eos_token_id": 5}))
    raw, tokenizer = Tokenizer.from_file(str(file)), HFTokenizer(tmp_path)
    for text in ("Steps:\n\n1. Add 12", "x\u00b2 \ufb01ne<|end|>\n\n 12"):
        assert tokenizer.encode(text) == raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.vocabulary() == raw.get_vocab()
    end = raw.token_to_id("<|end|>")
    assert tokenizer.eos_token_ids == ((5, end) if kind else (5,))
    assert tokenizer.special_roles == (
        {5: "eos_token_id", end: "eos_token", end + 1: "pad_token"} if kind else {5: "eos_token_id"}
    )


def test_unusable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        HFTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        HFTokenizer(tmp_path / "empty")
    save(tmp_path / "cut off")
    (tmp_path / "cut off/tokenizer.json").write_text("version https://git-lfs")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        HFTokenizer(tmp_path / "cut off")
    with pytest.raises(CheckpointError, match="end of sequence"):
        HFTokenizer(save(tmp_path / "no eos", eos=None))
    with pytest.raises(CheckpointError, match="no chat template"):
        HFTokenizer(save(tmp_path / "no template", template=None)).encode_chat("hi")
    # Of these configurations alone, and of another class's files, `transformers` makes one without a vocabulary.
    for name, text in (
        ("config.json", '{"model_type": "qwen2", "eos_token_id": 2}'),
        ("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}'),
    ):
        (tmp_path / name).write_text(text)
        assert not has_tokenizer(tmp_path)
        with pytest.raises(CheckpointError, match="no tokenizer files"):
            HFTokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match="its vocabulary has added tokens only"):
        HFTokenizer(tmp_path)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_incremental_decoding_holds_back_unfinished_characters(tmp_path: Path, step: int) -> None:
    tokenizer = HFTokenizer(save(tmp_path))
    stream, ids = IncrementalDecoder(tokenizer), tokenizer.encode(TEXT)
    texts = [stream.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(texts) == TEXT
    assert stream.held == ""
    assert not any("\ufffd" in text for text in texts)
    assert len([text for text in texts if text]) > 5


@pytest.mark.parametrize("broken", [False, True])
def test_a_long_run_without_characters_is_not_decoded_again_with_every_token(tmp_path: Path, broken: bool) -> None:
    tokenizer = HFTokenizer(save(tmp_path))
    first, second = tokenizer.encode("one "), tokenizer.encode(" two é")
    token = tokenizer.encode("é")[0] if broken else tokenizer.end_token_id
    assert tokenizer.decode([token]) == ("\ufffd" if broken else "")
    stream, text = IncrementalDecoder(tokenizer), ""
    for new in [*first, *[token] * 200, *second, *[token] * 200, *second]:
        text += stream.add([new])
        assert len(stream._last) < 20
    assert text == tokenizer.decode([*first, *[token] * 200, *second, *[token] * 200, *second])

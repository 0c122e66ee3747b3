"""Tokenizers made in a test, saved as `transformers` saves them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MARK = "\u2581"  # SentencePiece's space


def save_letters(folder: Path) -> None:
    """A token a small letter, and `</s>`: 27 tokens."""
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(string.ascii_lowercase)}, []))
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(str(folder))


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

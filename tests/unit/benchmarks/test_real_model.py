"""The tokenizer of benchmarks/lib/real_model.py."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.lib.real_model import set_pre_tokenizer
from tests.helpers.chat_models import save_bytes


@pytest.mark.parametrize(
    ("kind", "words"), [("smollm", ["1", "2", "Ġa"]), ("gpt-2", ["12", "Ġa"]), (None, ["12", "Ġa"])]
)
def test_digits_stand_alone_where_the_file_says_smollm(tmp_path: Path, kind: str | None, words: list[str]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_bytes(tmp_path, None, [], [("1", "2"), ("Ġ", "a")]))
    set_pre_tokenizer(tokenizer, kind)
    assert tokenizer.tokenize("12 a") == words

"""The files beside the weights of a Hugging Face directory: those of the tokenizer, and generation_config.json.

Files of two tokenizers never stand side by side: `transformers` would mix them without a word.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_tlt.config.json_reader import read_object_if_there
from megatron_tlt.data.tokenizer import TOKENIZER_FILES, HFTokenizer, end_tokens

_GENERATION = "generation_config.json"


def copy_companions(source: Path, out: Path) -> None:
    """Copies the tokenizer's files and generation_config.json of a model directory; removes a tokenizer in `out`."""
    copy_tokenizer(source, out)
    if (source / _GENERATION).is_file() and source.resolve() != out.resolve():
        shutil.copyfile(source / _GENERATION, out / _GENERATION)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copies all files of the tokenizer in `source`, in the place of those in `out`."""
    if source.resolve() == out.resolve():
        return
    for old in _found(out):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for path in _found(source):
        if path.is_dir():
            shutil.copytree(path, out / path.name)
        else:
            shutil.copyfile(path, out / path.name)


def copy_run_companions(model: Path, tokenizer: Path, out: Path) -> None:
    """The files of a run of `model` with the tokenizer of another directory: generation_config.json is the model's,
    with every token that ended the run's responses. Raises CheckpointError.
    """
    copy_companions(model, out)
    if tokenizer.resolve() == model.resolve():
        return
    copy_tokenizer(tokenizer, out)
    values = read_object_if_there(model / _GENERATION)
    values["eos_token_id"] = end_tokens(model, HFTokenizer(tokenizer))
    (out / _GENERATION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _found(directory: Path) -> list[Path]:
    return sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)})

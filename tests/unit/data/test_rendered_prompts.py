"""Rows of conversations that are rendered already, put into a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import SftConfig, TrainingConfig
from megatron_tlt.trainer.input_warnings import input_warnings
from tests.helpers.chat_models import DEMO_POLICY

RENDERED = "<|user|>1 + 2<|end|><|assistant|>"
ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1", "completion": "2"},
    {"prompt": RENDERED, "completion": "3"},
    {"prompt": "1 + 2", "completion": "<|pad|>call"},
    {"prompt": [{"role": "system", "content": "<|pad|>"}, {"role": "user", "content": "1"}], "completion": "3"},
]


def config_of(kind: str, path: Path, **section: Any) -> TrainingConfig:
    model = {"path": str(DEMO_POLICY)}
    if kind == "sft":
        return SftConfig.model_validate({"model": model, "sft": {"train_path": str(path), "out": "o", **section}})
    data = {"train": {"kind": "jsonl", "path": str(path)}, **section}
    return build_config({"model": model, "data": data, "rewards": {"functions": [{"name": "format", "pattern": "."}]}})


@pytest.mark.parametrize("kind", ["data", "sft"])
def test_rendered_rows_are_counted_before_a_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (warning,) = [text for text in input_warnings(config_of(kind, path), "cpu") if "special token" in text]
    assert warning.startswith("sft.train_path = " if kind == "sft" else "data.train.path = ")
    assert f"{path}: 2 of 4 rows have a special token in their text" in warning
    assert f"(first {path}:2: '<|user|>')" in warning and f"{kind}.chat_template: false takes" in warning
    assert not [text for text in input_warnings(config_of(kind, path, chat_template=False), "cpu") if "special" in text]
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[2]) + "\n")
    assert not [text for text in input_warnings(config_of(kind, path), "cpu") if "special" in text]

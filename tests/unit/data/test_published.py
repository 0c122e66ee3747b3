"""configs/data: rows in the form in which the data sets are published, through tokenizer and reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.yaml_reader import read_config_file
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError
from megatron_tlt.rewards.base import build_result
from megatron_tlt.types import Prompt
from tests.helpers.mpi import ROOT

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""
ASK = 'Solve the problem. The last line must be of the form Answer: $Answer.\n\nWhat is {}?\n\nUse a line of its own.'


def gsm8k(question: str, steps: str) -> dict[str, Any]:
    return {"question": question, "answer": steps}


def problem(text: str, solution: str) -> dict[str, Any]:
    return {"problem": text, "level": "Level 5", "type": "Algebra", "solution": solution}


def dapo(expression: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ASK.format(expression), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


def publish(folder: Path, name: str, rows: list[dict[str, Any]], card: str = "") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    if card:
        (folder / "README.md").write_text(card)


def prompts_of(data: str, train: Path, held_out: Path, tmp_path: Path) -> tuple[list[Prompt], list[Prompt], Any]:
    """Training and held-out prompts of configs/data/DATA.yaml over these directories, and its rewards."""
    places = [f"data.train.path={train}", f"data.eval.path={held_out}", "data.train.shuffle=false", "model.path=m"]
    config = build_config(read_config_file(ROOT / f"configs/data/{data}.yaml"), places)
    tokenizer = HFTokenizer(ROOT / "assets/demo-policy")
    streams = [build_prompts(config.data, which, tokenizer, 0) for which in ("train", "eval")]
    for prompt in (*streams[0].next_batch(0), *streams[1].next_batch(0)):
        assert prompt.token_ids
    return streams[0].next_batch(2), streams[1].next_batch(1), config.rewards

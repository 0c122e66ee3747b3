"""configs/data: rows in the form in which the data sets are published, through tokenizer and reward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_tlt.config.checks.learning import check_data, check_rewards
from megatron_tlt.config.load import build_config
from megatron_tlt.config.yaml_reader import read_config_file
from megatron_tlt.data.prompts import build_prompts, open_source
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError
from megatron_tlt.rewards.base import judge
from megatron_tlt.rewards.build import build_scorers
from megatron_tlt.types import Sample
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
ASK = "Solve the problem. The last line must be of the form Answer: $Answer.\n\nWhat is {}?\n\nUse a line of its own."


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


@dataclass
class Published:
    """A data set as its authors publish it, with responses to its first training row."""

    train: dict[str, list[dict[str, Any]]]  # rows of every file
    held_out: dict[str, list[dict[str, Any]]]  # none: another split of `train`
    answers: list[str]  # of the training rows, then of the first held-out one
    right: list[str]
    wrong: list[str]
    system: str = SYSTEM
    card: str = ""


SETS = {
    "gsm8k": Published(
        {
            "main/train-00000-of-00001.parquet": [
                gsm8k("A pen costs 2. What do 3 cost?", "Three cost 3*2 = <<3*2=6>>6.\n#### 6"),
                gsm8k("And 600?", "600*2 = <<600*2=1200>>1200\n#### 1,200"),
            ],
            "main/test-00000-of-00001.parquet": [gsm8k("And one?", "One costs 2.\n#### 2")],
            "socratic/train-00000-of-00001.parquet": [gsm8k("Why?", "How many? ** So\n#### 7")],
        },
        {},
        ["6", "1,200", "2"],
        ["3 * 2 = 6, so \\boxed{6}", "The answer is 6.", "#### 6"],
        ["\\boxed{7}", "6 pens cost 12"],
        card=GSM8K_CARD,
    ),
    "math": Published(
        {
            "data/train-00000-of-00001.parquet": [
                problem("How much?", "Not $\\boxed{1}$ but $\\boxed{\\frac{\\sqrt{3}}{2}}$."),
                problem("How many?", "It is $\\boxed 2$."),
            ],
            "data/test-00000-of-00001.parquet": [problem("Which?", "It is $\\boxed{5}$.")],
        },
        {"test.jsonl": [problem("Which?", "It is $\\boxed{5}$.") | {"answer": "5", "unique_id": "test/1.json"}]},
        ["\\frac{\\sqrt{3}}{2}", "2", "5"],
        ["Hence \\boxed{\\frac{\\sqrt 3}{2}}", "\\boxed{\\sqrt{3}/2}"],
        ["\\boxed{\\frac{3}{2}}", "\\boxed{1}"],
    ),
    "dapo-math-17k": Published(
        {"data/dapo-math-17k.parquet": [dapo("30 + 4", "34"), dapo("1 - 2", "-1")]},
        {"data/aime-2024.parquet": [dapo("2 * 102", "204")]},
        ["34", "-1", "204"],
        ["30 + 4 = 34\nAnswer: 34", "Answer: 4\nAnswer: $34$", "answer: \\boxed{34}"],
        ["Answer: 35", "It is 34.", "Answer: 34\nAnswer: 3"],
        system="",
    ),
}


def publish(folder: Path, files: dict[str, list[dict[str, Any]]], card: str) -> Path:
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize("data", SETS)
def test_published_rows_have_prompts_answers_and_rewards(data: str, tmp_path: Path) -> None:
    published = SETS[data]
    train = publish(tmp_path / "train", published.train, published.card)
    held_out = publish(tmp_path / "held-out", published.held_out, "") if published.held_out else train
    places = [f"data.train.path={train}", f"data.eval.path={held_out}", "data.train.shuffle=false", "model.path=m"]
    config = build_config(read_config_file(ROOT / f"configs/data/{data}.yaml"), places)
    assert not list(check_data(config)) and not list(check_rewards(config))

    tokenizer = HFTokenizer(ROOT / "assets/demo-policy")
    streams = [build_prompts(config.data, which, tokenizer, 0) for which in ("train", "eval")]
    prompts = [*streams[0].next_batch(2), *streams[1].next_batch(1)]
    assert [prompt.answer for prompt in prompts] == published.answers
    for prompt in prompts:
        expected = tokenizer.encode_chat(prompt.text, published.system or None)
        assert list(prompt.token_ids) == expected

    scorers = build_scorers(config.rewards)
    for responses, reward in ((published.right, 1.0), (published.wrong, 0.0)):
        for text in responses:
            sample = Sample(0, 0, [1], [], text, "stop", 0)
            result = judge(scorers, -1.0, prompts[0], sample)
            weights = sum(function.weight for function in config.rewards.functions)
            assert (result.value, result.correct) == (reward * weights, reward == 1.0), text


def test_every_file_of_configs_data_is_tried() -> None:
    assert {path.stem for path in (ROOT / "configs/data").glob("*.yaml")} == set(SETS)


def test_a_row_without_the_answer_that_the_pattern_finds_is_named(tmp_path: Path) -> None:
    publish(tmp_path, {"train.jsonl": [problem("a", "\\boxed{1}"), problem("b", "It is two.")]}, "")
    source = build_config(read_config_file(ROOT / "configs/data/math.yaml"), ["model.path=m"]).data.train
    with pytest.raises(DataError, match=r"train.jsonl:2: answer_pattern finds nothing in field 'solution', .* 'It is"):
        open_source(source.model_copy(update={"path": str(tmp_path)}), "data.train", 0)

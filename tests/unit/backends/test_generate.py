"""`megatron-tlt generate`: files in, files out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.backends.generate import generate_file, read_prompts
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.data.prompts import EnvPrompts
from megatron_tlt.errors import DataError
from megatron_tlt.types import SamplingParams
from tests.helpers.fake_decoder import CharTokenizer


def test_generate_file(model_dir: Path, tmp_path: Path):
    prompts, out, stats = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl", tmp_path / "stats.json"
    prompts.write_text('{"prompt": "abc"}\n\n{"token_ids": [4, 5]}\n')
    params = SamplingParams(max_tokens=9, seed=2)
    read = read_prompts(prompts, CharTokenizer(), chat=False)
    generate_file(model_dir, read, out, params, CharTokenizer(), n=3, stats_path=stats)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(a["prompt_index"], a["sample_index"]) for a in lines] == [
        (p, i) for p in (0, 1) for i in range(3)
    ]
    assert all(
        set(a) == {"prompt_index", "sample_index", "text", "token_ids", "finish_reason"}
        for a in lines
    )
    report = json.loads(stats.read_text())
    assert report["generated_tokens"] == sum(len(a["token_ids"]) for a in lines)
    assert report["tokens_per_s"] > 0
    assert {"running_curve", "decoder"} <= report.keys()
    again = tmp_path / "again.jsonl"
    generate_file(
        model_dir, read, again, params, CharTokenizer(), n=3, rollout=RolloutSection(kernels="torch")
    )
    assert [json.loads(x)["token_ids"] for x in again.read_text().splitlines()] == [
        a["token_ids"] for a in lines
    ]
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "an object with either"),
        ('{"prompt": "a", "token_ids": [1]}', "an object with either"),
        ('{"prompt": [1]}', "must be a string"),
        ('{"token_ids": ["a"]}', "a list of integers"),
        ('{"token_ids": []}', "no tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(file, CharTokenizer(), chat=False)
    assert f"{file}:2" in str(caught.value)


class Codes(CharTokenizer):
    """Characters by their numbers."""

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]


def test_an_environment_sees_answers_and_other_fields(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "answer": 7, "level": 2}\n{"token_ids": [4]}\n')
    texts = iter(["c", None])
    seen = []
    env = EnvPrompts((), lambda prompts: [seen.append(p) or next(texts) for p in prompts])
    first, second = read_prompts(file, Codes(), chat=False, env=env)
    assert (seen[0].answer, seen[0].metadata, seen[1].answer) == ("7", {"level": 2}, None)
    assert (first.text, first.answer, second.token_ids) == ("a\n\nc", "7", (4,))
    texts = iter(["c", "d"])
    with pytest.raises(DataError, match=r"p\.jsonl:2: the environment's text cannot be added to token_ids"):
        read_prompts(file, Codes(), chat=False, env=env)


def test_prompts_need_a_tokenizer_and_chat_wraps_them(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "b"}\n')
    with pytest.raises(DataError, match="needs a tokenizer"):
        read_prompts(file, None, chat=False)
    messages = '[{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]'
    file.write_text(f'{{"prompt": "b"}}\n{{"prompt": {messages}}}\n')
    prompts = read_prompts(file, CharTokenizer(), chat=True)
    assert [CharTokenizer().decode(prompt.token_ids) for prompt in prompts] == ["A b B", "A c d B"]
    with pytest.raises(DataError, match=r'with --chat also a list of messages'):
        read_prompts(file, CharTokenizer(), chat=False)
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl", None, chat=False)

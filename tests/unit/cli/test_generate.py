"""`megatron-tlt generate`: files in, files out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.cli.generate import generate_file
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.data.prompts import EnvPrompts, file_prompts
from megatron_tlt.errors import DataError
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.types import SamplingParams
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.tiny_models import TINY, random_weights


def test_generate_file(tmp_path: Path):
    model_dir = tmp_path / "model"
    save_hf(model_dir, TINY, random_weights(TINY))
    prompts, out, stats = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl", tmp_path / "stats.json"
    prompts.write_text('{"prompt": "abc"}\n\n{"token_ids": [4, 5]}\n')
    params = SamplingParams(max_tokens=9, seed=2)
    read = file_prompts(prompts, CharTokenizer(), chat=False)
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
        ("{}", "no field 'prompt'; there are none"),
        ('{"prompt": "a", "token_ids": [1]}', "a prompt and token_ids, of which one is needed"),
        ('{"prompt": 1}', "must be a string or a list of chat messages"),
        ('{"token_ids": ["a"]}', "a list of integers"),
        ('{"token_ids": []}', "not empty"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        file_prompts(file, CharTokenizer(), chat=False)
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
    first, second = file_prompts(file, Codes(), chat=False, env=env)
    assert (seen[0].answer, seen[0].metadata, seen[1].answer) == ("7", {"level": 2}, None)
    assert (first.text, first.answer, second.token_ids) == ("a\n\nc", "7", (4,))
    texts = iter(["c", "d"])
    with pytest.raises(DataError, match=r"p\.jsonl:2: the environment's text cannot be added to token_ids"):
        file_prompts(file, Codes(), chat=False, env=env)


def test_a_chat_template_wraps_prompts(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    messages = '[{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]'
    file.write_text(f'{{"prompt": "b"}}\n{{"prompt": {messages}}}\n')
    prompts = file_prompts(file, CharTokenizer(), chat=True)
    assert [CharTokenizer().decode(prompt.token_ids) for prompt in prompts] == ["A b B", "A c d B"]
    with pytest.raises(DataError, match=r"p\.jsonl:2: 2 chat messages need .*generate: --chat"):
        file_prompts(file, CharTokenizer(), chat=False)
    with pytest.raises(DataError, match="no such file"):
        file_prompts(tmp_path / "none.jsonl", CharTokenizer(), chat=False)

"""`megatron-tlt generate`: files in, files out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.backends import build
from megatron_tlt.cli.generate import generate_file
from megatron_tlt.data.prompts import EnvPrompts, file_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.trainer.chat_checks import plain_prompt_warning
from megatron_tlt.types import EngineStats, Prompt, Sample, SamplingParams
from tests.helpers.chat_models import QWEN3, chat_model
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.mpi import ROOT


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


@pytest.mark.parametrize(
    ("template", "line", "is_warned"),
    [
        (QWEN3, '{"prompt": "a"}', True),
        (QWEN3, '{"prompt": "<|user|>a"}', False),
        (QWEN3, '{"token_ids": [4]}', False),
        (None, '{"prompt": "a"}', False),
    ],
)
def test_plain_prompts_of_a_chat_model_are_named(tmp_path: Path, template: str | None, line: str, is_warned: bool):
    model, file = chat_model(tmp_path / "m", template), tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    prompts = file_prompts(file, Codes(), chat=False)
    assert (plain_prompt_warning(HFTokenizer(model), prompts) is not None) == is_warned


def test_trajectories_without_an_answer_of_their_environment_are_counted_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    samples = [Sample(0, i, [1], [], "", "abort", 0, failure=why) for i, why in enumerate((None, "no key", "no net"))]
    engine = SimpleNamespace(generate=lambda call: samples, take_stats=EngineStats, close=lambda: None)
    monkeypatch.setattr(build, "build_backend", lambda options: engine)
    prompts, model = [Prompt(0, "p:1", (1,), "")], ROOT / "assets/demo-policy"
    generate_file(model, prompts, tmp_path / "out.jsonl", SamplingParams(max_tokens=4), None, n=3)
    (warning,) = caplog.messages
    assert warning.startswith("2 of 3 trajectories ended without an answer of their environment; one of them: ")
    assert warning.endswith(": prompt 0, sample 1: no key")


def test_a_response_that_is_too_long_is_refused_by_its_option_and_prompt(tmp_path: Path):
    prompts, model = [Prompt(0, "p:1", (1,), ""), Prompt(1, "p:2", (1, 2), "")], ROOT / "assets/demo-policy"
    with pytest.raises(ConfigError, match=r"^--max-tokens = 9999999: .* prompt, p:2, has 2 tokens, "):
        generate_file(model, prompts, tmp_path / "out.jsonl", SamplingParams(max_tokens=9999999), None)

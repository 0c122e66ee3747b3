"""`megatron-tlt generate`: files in, files out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.backends import build
from megatron_tlt.cli.generate import _checked_tokenizer, _prompt_warnings, generate_file
from megatron_tlt.cli.main import _parser
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.data.prompts import EnvPrompts, file_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.together import SingleProcess
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


def test_prompts_that_the_chat_template_does_not_fit_are_named(tmp_path: Path):
    """Rendered ones, in any message, and tools that it does not read."""
    tokenizer, file = HFTokenizer(chat_model(tmp_path / "m", QWEN3)), tmp_path / "p.jsonl"
    chat = [{"role": "system", "content": "<|pad|>"}, {"role": "user", "content": "1"}]
    rows = {"prompt": "1"}, {"prompt": "<|user|>1"}, {"prompt": chat, "tools": '[{"name": "f"}]'}
    words = ["generate", "--model", str(tmp_path / "m"), "--prompts", str(file), "--out", "o"]
    said = []
    for count in (1, 3):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        prompts = file_prompts(file, tokenizer, chat=True)
        said.append(_prompt_warnings(_parser().parse_args([*words, "--chat"]), prompts, tokenizer))
    about = f"--prompts {file}"
    none, (tools, rendered) = said
    assert not none
    assert tools.startswith(f"{about}: the chat template of {tmp_path / 'm'} does not read 'tools', so prompts do not")
    assert rendered.startswith(f"{about}: 2 of 3 rows have a special token in their text, as a rendered")
    assert f"(first {file}:2: '<|user|>')" in rendered


def test_a_tokenizer_that_cannot_be_used_is_a_problem_of_the_model(tmp_path: Path):
    model = chat_model(tmp_path / "m", QWEN3)
    (model / "generation_config.json").write_text('{"eos_token_id": "<|end|>"}')
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = ["generate", "--model", str(model), "--prompts", str(tmp_path / "p.jsonl"), "--out", "o"]
    with pytest.raises(ConfigError, match=r"^--model = .*generation_config\.json: eos_token_id = '<\|end\|>' must be"):
        _checked_tokenizer(_parser().parse_args(words), RolloutSection(), None, SingleProcess())


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

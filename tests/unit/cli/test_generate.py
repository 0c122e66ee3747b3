"""`megatron-tlt generate`: files in, files out."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.backends import build
from megatron_tlt.cli.generate import _checked_tokenizer, _prompt_warnings, _write_responses
from megatron_tlt.cli.main import _parser
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.prompts import EnvPrompts, file_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import BackendError, ConfigError, DataError
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.resilience.rollout_cache import ResponseWriter
from megatron_tlt.trainer import models
from megatron_tlt.trainer.chat_checks import plain_prompt_warning
from megatron_tlt.types import EngineStats, Prompt, Sample, SamplingParams
from tests.helpers.chat_models import QWEN3, chat_model
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.mpi import ROOT
from tests.helpers.runs import generate_alone
from tests.helpers.tiny_models import hf_model


@pytest.mark.parametrize(
    ("line", "message"),
    [
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


def test_a_drafter_that_no_kind_reads_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """`rollout.speculation.drafter_path=DIR` alone drafts nothing."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = [
        "generate",
        "--model",
        str(ROOT / "assets/demo-policy"),
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--out",
        "o",
    ]
    engine = RolloutSection(speculation=SpeculationSection(drafter_path="d"))
    _checked_tokenizer(_parser().parse_args(words), engine, None, SingleProcess())
    assert "rollout.speculation.drafter_path = d has no effect with rollout.speculation.drafter = none" in caplog.text


def test_trajectories_without_an_answer_of_their_environment_are_counted_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    samples = [Sample(0, i, [1], [], "", "abort", 0, failure=why) for i, why in enumerate((None, "no key", "no net"))]
    can = CAPABILITIES["embedded"]
    engine = SimpleNamespace(
        generate=lambda call: samples, take_stats=EngineStats, close=lambda: None, capabilities=can
    )
    monkeypatch.setattr(build, "build_backend", lambda options: engine)
    monkeypatch.setattr(models, "push_policy", lambda *_, **__: "")
    prompts, model = [Prompt(0, "p:1", (1,), "")], ROOT / "assets/demo-policy"
    generate_alone(model, prompts, tmp_path / "out.jsonl", SamplingParams(max_tokens=4), n=3)
    (warning,) = caplog.messages
    assert warning.startswith("2 of 3 trajectories ended without an answer of their environment; one of them: ")
    assert warning.endswith(": prompt 0, sample 1: no key")


@pytest.mark.parametrize(
    ("ignore_eos", "num_cut", "is_warned"), [(False, 1, True), (False, 0, False), (True, 1, False)]
)
def test_cut_responses_are_a_warning_where_they_are_many(
    ignore_eos: bool, num_cut: int, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    samples = [Sample(0, i, [1], [], "", "length" if i < num_cut else "stop", 0) for i in range(20)]
    params = SamplingParams(max_tokens=4, ignore_eos=ignore_eos)
    _write_responses(tmp_path / "o.jsonl", samples, lambda _: {}, params, False)
    assert ("5.0% of the responses reached --max-tokens = 4 and" in caplog.text) == is_warned


def test_a_response_that_is_too_long_is_refused_by_its_option_and_prompt(tmp_path: Path):
    prompts, model = [Prompt(0, "p:1", (1,), ""), Prompt(1, "p:2", (1, 2), "")], ROOT / "assets/demo-policy"
    with pytest.raises(ConfigError, match=r"^--max-tokens = 9999999: .* prompt, p:2, has 2 tokens, "):
        generate_alone(model, prompts, tmp_path / "out.jsonl", SamplingParams(max_tokens=9999999))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    hf_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
PROMPTS = [Prompt(i, f"p:{i}", (5 + i, 6), "") for i in range(3)]


def generated(model: Path, out: Path, params: SamplingParams = PARAMS) -> EngineStats:
    return generate_alone(model, PROMPTS, out, params, n=2)


def stopped(model: Path, out: Path, patch: pytest.MonkeyPatch) -> Path:
    """A call whose engine fails with four of six responses finished; the directory of these."""
    add, count = ResponseWriter.add, [0]

    def add_and_fail(self: ResponseWriter, *response: Any) -> None:
        add(self, *response)
        count[0] += 1
        if count[0] == 4:
            raise BackendError("the engine has failed")

    with patch.context() as failing:
        failing.setattr(ResponseWriter, "add", add_and_fail)
        with pytest.raises(BackendError, match="the engine has failed"):
            generated(model, out)
    assert not out.exists()
    return out.with_name(f"{out.name}.unfinished")


def test_a_call_that_was_stopped_generates_only_the_rest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = generated(model, tmp_path / "whole.jsonl")
    out = tmp_path / "new" / "out.jsonl"
    unfinished = stopped(model, out, monkeypatch)
    for path in (unfinished, *unfinished.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    rest = generated(model, out)
    assert (rest.finished_requests, rest.generated_tokens < whole.generated_tokens) == (2, True)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert f"reuses 4 of 6 responses, which earlier starts have left in {unfinished}\n" in capsys.readouterr().out
    assert os.listdir(out.parent) == ["out.jsonl"]
    stopped(model, out := tmp_path / "again.jsonl", monkeypatch)
    assert generate_alone(model, PROMPTS, out, PARAMS, n=3).finished_requests == 5, "more samples of a prompt"


@pytest.mark.parametrize("change", ["seed", "weights"])
def test_responses_of_another_seed_or_model_are_not_used(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    out, params = tmp_path / "out.jsonl", replace(PARAMS, seed=4) if change == "seed" else PARAMS
    unfinished = stopped(model, out, monkeypatch)
    (unfinished / "notes").write_text("a user's")
    if change == "weights":
        hf_model("qwen3", initializer_range=0.1).save_pretrained(model)
    assert generated(model, out, params).finished_requests == 6
    (warning,) = caplog.messages
    assert warning.startswith(f"{unfinished}/step-000001/") and warning.endswith(": not used")
    assert (
        f"uses none of the responses in {unfinished}, of other settings, weights or another version"
        in capsys.readouterr().out
    )
    assert os.listdir(unfinished) == ["notes"], "what it has not made stays"


def test_responses_that_cannot_be_kept_end_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    push, asked = models.push_policy, []

    def noted(*given: Any, hashes: bool) -> str:
        asked.append(hashes)
        return push(*given, hashes=hashes)

    monkeypatch.setattr(models, "push_policy", noted)
    (tmp_path / "out.jsonl.unfinished").write_text("in the way")
    generated(model, tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
    (warning,) = caplog.messages
    assert warning.startswith("the rollout cache is off, a restart generates these responses again: ")
    os.mkfifo(tmp_path / "pipe")  # it keeps nothing beside a pipe
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    generated(model, tmp_path / "pipe")
    assert os.read(reader, 1 << 16).count(b"\n") == 6
    assert not (tmp_path / "pipe.unfinished").exists()
    assert asked == [True, False], "weights have a name, which takes a pass over them, for a cache alone"

"""Kinds of chat templates, messages and stop strings from public reports: a line with the file, or the right prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_tlt.cli.main import main
from tests.helpers.chat_models import QWEN3, chat_model
from tests.helpers.mpi import ROOT, run_one

USER = {"role": "user", "content": "1 + 2"}


def arguments(name: str, model: Path, row: dict[str, Any], *more: str) -> list[str]:
    """Of a command that reads one row."""
    folder = model.parent
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    if name == "generate":
        paths = ["--model", str(model), "--prompts", str(rows), "--out", str(folder / "out.jsonl"), "--overwrite"]
        return [name, *paths, "--chat", "--max-tokens", "60", *more]
    data = ["data.train.kind=jsonl", f"data.train.path={rows}", "data.train.tasks=[]", "data.eval=null"]
    places = [f"model.path={model}", f"train.run_dir={folder / 'run'}", "rewards.functions=[{name: exact}]"]
    return [name, str(ROOT / "configs/quickstart.yaml"), *data, *places, *more]


@pytest.mark.parametrize(
    ("template", "message", "words"),
    [
        ("{{ messages[0].content + 1 }}", USER, "fails on messages of user, user: TypeError"),
        ("", USER, "chat_template.jinja: the chat template is empty"),
        ("{% for m in messages %}", USER, "no Jinja template"),
        (QWEN3, {"role": "developer", "content": "Be brief."}, "leaves out the text of messages with role 'developer'"),
        (QWEN3, {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a part of type 'image_url'"),
    ],
)
def test_a_template_or_message_that_cannot_be_is_named_by_check(
    template: str, message: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chat_model(tmp_path / "m", template)
    assert main(arguments("check", model, {"prompt": [message, USER], "answer": "3"})) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert str(model) in printed or "rows.jsonl:1" in printed


def test_a_variable_that_is_not_read_is_a_warning_and_one_of_ours_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, row = chat_model(tmp_path / "m", QWEN3), {"prompt": "1 + 2", "answer": "3"}
    assert main(arguments("check", model, row, "data.chat_template_kwargs={enable_thinkin: false}")) == 0
    printed = capsys.readouterr().out
    assert "does not read 'enable_thinkin', which changes nothing; it reads 'enable_thinking'" in printed
    assert main(arguments("check", model, row, "data.chat_template_kwargs={add_generation_prompt: false}")) == 2
    assert "'add_generation_prompt': cannot be set" in capsys.readouterr().err
    assert main(arguments("generate", model, row, "--chat-template-kwargs", '{"messages": []}')) == 2
    assert "--chat-template-kwargs = 'messages': cannot be set" in capsys.readouterr().err


def test_tools_that_the_template_does_not_show_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    plain = turns + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    env = "env={kind: python, tool_role: user, max_observation_tokens: 16}"
    options = env, "rollout.max_tokens=64", "data.max_prompt_tokens=400"
    for template, is_shown in ((plain, False), ("{{ tools }}" + plain, True)):
        model = chat_model(tmp_path / f"m{is_shown}", template)
        assert main(arguments("check", model, {"prompt": "1 + 2", "answer": "3"}, *options)) == 0
        printed = capsys.readouterr().out
        assert ("does not read 'tools', so no prompt says that there are python" in printed) is not is_shown
        row = {"prompt": "1 + 2", "answer": "3", "tools": [{"type": "function", "function": {"name": "add"}}]}
        assert main(arguments("check", model, row)) == 0
        said = (
            f"rows.jsonl: the chat template of {model} does not read 'tools', so prompts do not show those of its rows"
        )
        assert (said in capsys.readouterr().out) is not is_shown


def test_a_template_that_is_not_there_or_that_only_processors_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, row = chat_model(tmp_path / "m", None), {"prompt": "1 + 2", "answer": "3"}
    text = f"{model} has no chat template: prompts are plain text; data.chat_template=false says that this is meant"
    for options, is_said in ([], True), (["data.chat_template=false"], False):
        assert main(arguments("check", model, row, *options)) == 0
        assert (text in capsys.readouterr().out) is is_said
    (model / "chat_template.json").write_text(json.dumps({"chat_template": QWEN3}))
    assert main(arguments("check", model, row)) == 0
    printed = capsys.readouterr().out
    assert "chat_template.json is read for processors of images only" in printed and text not in printed


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("", "rollout.stop = '3<|end|>': has the special token '<|end|>'"),
        ("chat_template.jinja", "data.chat_template = True: needs a template that can be used: "),
        ("tokenizer.json", "no usable tokenizer: "),
    ],
)
def test_a_tokenizer_here_is_checked_where_its_model_is_elsewhere(
    broken: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, row = chat_model(tmp_path / "m", QWEN3), {"prompt": "1 + 2", "answer": "3"}
    if broken:
        (model / broken).write_text("{%")
    places = "model.path=not/here", f"model.tokenizer={model}", "rollout.stop=['3<|end|>']"
    assert main([*arguments("check", model, row, *places), "--elsewhere"]) == 2
    assert words in capsys.readouterr().err


def test_a_pattern_with_a_text_that_responses_lack_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, pattern = {"prompt": "1 + 2", "answer": "3"}, "{name: exact, pattern: '<think>.*</think>(.*)'}"
    special = r"{name: exact, pattern: '(\d+)<\|end\|>'}"
    for end, is_said in ("<think>\\n", True), ("<think></think>", False):
        model = chat_model(tmp_path / f"m{is_said}", QWEN3 + f"{{{{- '{end}' }}}}")
        assert main(arguments("check", model, row, f"rewards.functions=[{pattern}, {special}]")) == 0
        printed = " ".join(capsys.readouterr().out.split())
        said = "rewards.functions.0.pattern: '<think>' is written by the chat template at the end of the prompt"
        assert (said in printed) is is_said
        assert "rewards.functions.1.pattern: '<|end|>' is a special token" in printed


@pytest.mark.mpi
def test_stop_strings_of_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, row = chat_model(tmp_path / "m", QWEN3), {"prompt": "1 + 2", "answer": "3"}
    assert main(arguments("check", model, row, "rollout.stop=['3<|end|>']")) == 2
    printed = capsys.readouterr().err
    assert "rollout.stop = '3<|end|>': has the special token '<|end|>'" in printed
    code, printed = run_one(*arguments("generate", model, {"prompt": "1 + 2"}, "--stop", "3<|end|>"), check=False)
    assert code == 2 and "--stop = '3<|end|>'" in printed
    run_one(*arguments("generate", model, {"prompt": "1 + 2"}, "--ignore-eos", "--stop", "<|end|>"))
    response = json.loads((tmp_path / "out.jsonl").read_text())
    end = AutoTokenizer.from_pretrained(str(model)).convert_tokens_to_ids("<|end|>")
    assert response["finish_reason"] == "stop"
    assert response["token_ids"].index(end) == len(response["token_ids"]) - 1

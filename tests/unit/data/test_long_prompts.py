"""Prompts longer than `data.max_prompt_tokens`: counted before a run, dropped, cut or refused in it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.data.prompts import PromptStream, build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.envs.build import environment_tools
from megatron_tlt.errors import ConfigError, DataError, SharedError
from megatron_tlt.trainer.input_warnings import input_warnings
from megatron_tlt.trainer.preflight import check_report, input_problems
from tests.helpers.chat_models import DEMO_POLICY as POLICY
from tests.helpers.chat_models import chat_model


@pytest.fixture
def sixteen(tmp_path: Path) -> Path:
    """Rows of which every fourth one fits into 64 tokens."""
    path = tmp_path / "lengths.jsonl"
    texts = ["Calculate 1 + 1. " * (1 if i % 4 == 0 else 40) for i in range(16)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts))
    return path


def config_of(path: Path, **data: Any) -> Config:
    train = {"kind": "jsonl", "path": str(path)}
    tree = {"data": {"train": train, "max_prompt_tokens": 64, **data}, "rewards": {"functions": [{"name": "exact"}]}}
    return build_config({"model": {"path": str(POLICY), "max_context": 1024}, "rollout": {"max_tokens": 64}, **tree})


def test_long_prompts_are_counted_before_a_run(sixteen: Path) -> None:
    dropped = "12 of 16 rows have more than data.max_prompt_tokens = 64 tokens (the longest has"
    assert f"warning: data.train.path = {sixteen}: {dropped}" in check_report(config_of(sixteen), 1)
    assert "are cut at their beginning" in check_report(config_of(sixteen, long_prompts="cut_left"), 1)
    assert "max_prompt_tokens = 512" not in check_report(config_of(sixteen, max_prompt_tokens=512), 1)
    with pytest.raises(ConfigError, match="long_prompts = error: 12 of 16 rows"):
        check_report(config_of(sixteen, long_prompts="error"), 1)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens = 4: must be >= .*: all 16 rows"):
        check_report(config_of(sixteen, max_prompt_tokens=4), 1)


def test_schemas_of_tools_count_as_in_the_run(sixteen: Path, tmp_path: Path) -> None:
    """`check` renders prompts with the environment's tools, also to see whether the template takes them."""
    template = (POLICY / "chat_template.jinja").read_text()
    model = chat_model(tmp_path / "m", "{{ tools | tojson if tools }}" + template)
    tokenizer = HFTokenizer(model)
    tree = config_of(sixteen).model_dump(exclude_unset=True)
    tree["env"] = {"kind": "calculator", "max_observation_tokens": 32}
    tree["model"]["path"] = str(model)
    tools = environment_tools(build_config(tree).env)  # type: ignore[arg-type]
    shortest, longest = (len(tokenizer.encode_chat("Calculate 1 + 1. " * n, None, tools)) for n in (1, 40))
    with pytest.raises(ConfigError, match=rf"max_prompt_tokens = 64: must be >= {shortest}: all 16 rows"):
        check_report(build_config(tree), 1)
    tree["data"]["max_prompt_tokens"] = shortest
    (warning,) = [text for text in input_warnings(build_config(tree), "cpu") if "12 of 16 rows have more than" in text]
    assert f"data.max_prompt_tokens = {shortest} tokens (the longest has {longest})" in warning
    (model / "chat_template.jinja").write_text("{{ raise_exception('no tools') if tools }}" + template)
    (problem,) = input_problems(build_config(tree))
    assert "lengths.jsonl:1: " in problem.allowed and problem.allowed.endswith("no tools")


def stream_of(path: Path, **data: Any) -> PromptStream:
    return build_prompts(config_of(path, **data).data, "train", HFTokenizer(POLICY), 0)


def test_long_prompts_are_dropped_with_a_line_cut_or_an_error(sixteen: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    stream_of(sixteen).next_batch(8)
    assert [r for r in caplog.messages if "of the last 16 rows, 12 exceed data.max_prompt_tokens = 64" in r]
    whole = {p.dataset_id: p.token_ids for p in stream_of(sixteen, max_prompt_tokens=512).next_batch(16)}
    cut = stream_of(sixteen, long_prompts="cut_left").next_batch(16)
    assert all(p.token_ids == whole[p.dataset_id][-64:] for p in cut)
    message = r"lengths.jsonl:\d+: the prompt has \d+ tokens, .*_tokens allows 64"
    with pytest.raises(DataError, match=message):
        stream_of(sixteen, long_prompts="error").next_batch(16)
    late = stream_of(sixteen)
    late._long_prompts = "error"  # of a row behind the first one
    for ask, of_all_ranks in (late.peek, False), (late.next_batch, True):
        with pytest.raises(DataError, match=message) as found:
            ask(16)
        assert isinstance(found.value, SharedError) is of_all_ranks, "idle ranks peek alone: they cannot save"

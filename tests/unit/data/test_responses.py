"""Finished responses from files: the forms of a row, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_tlt.config.root import Config
from megatron_tlt.data.responses import read_responses
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError
from tests.helpers.chat_models import DEMO_POLICY, chat_model
from tests.helpers.runs import TOKENIZER

VOCAB = 288


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(TOKENIZER)


def config(**sections) -> Config:
    return Config(model={"path": str(TOKENIZER), "max_context": 64}, **sections)


def read(path: Path, rows: list[dict], tokenizer: HFTokenizer, most: int = 99, **sections):
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return read_responses(config(**sections), path, tokenizer, VOCAB, most)


def test_texts_messages_and_ids_are_the_same_response(tmp_path, tokenizer):
    prompt, response = tokenizer.encode_chat("1 + 2"), [*tokenizer.encode("3"), *tokenizer.eos_token_ids[:1]]
    user, assistant = ({"role": role, "content": text} for role, text in (("user", "1 + 2"), ("assistant", "3")))
    rows = [
        {"prompt": "1 + 2", "response": "3"},
        {"prompt": [user], "response": "3", "finish_reason": "stop"},
        {"messages": [user, assistant]},
        {"prompt_token_ids": prompt, "token_ids": response, "prompt": "other", "response": "other"},
        {"prompt": "1 + 2", "response": "3", "finish_reason": "length"},
        {"prompt": "1 + 2", "token_ids": response, "given": [[0, 1]]},
    ]
    found = read(tmp_path / "r.jsonl", rows, tokenizer)
    for trajectory in (*found[:4], found[5]):
        assert trajectory.token_ids.tolist() == [*prompt, *response]
        assert trajectory.response_start == len(prompt)
    assert found[4].token_ids.tolist() == [*prompt, *response[:-1]], "it was cut off: nothing ends it"
    assert [t.drawn.tolist()[0] for t in found] == [True] * 5 + [False]
    assert [t.prompt_id for t in found] == list(range(6))


def test_a_conversation_may_be_in_the_column_of_training_prompts(tmp_path, tokenizer):
    source = {"train": {"kind": "jsonl", "path": "x", "prompt_field": "messages"}}
    (found,) = read(tmp_path / "r.jsonl", [{"messages": MESSAGES}], tokenizer, data=source)
    (same,) = read(tmp_path / "r.jsonl", [{"prompt": "1 + 2", "response": "3"}], tokenizer)
    assert found.token_ids.tolist() == same.token_ids.tolist()


def test_tools_of_a_row_are_in_its_prompt(tmp_path):
    template = "{{ tools | tojson if tools }}" + (DEMO_POLICY / "chat_template.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = HFTokenizer(chat_model(tmp_path / "m", template))
    (found,) = read(tmp_path / "r.jsonl", [{"prompt": "1", "response": "3", "tools": tools}], tokenizer)
    assert found.token_ids.tolist()[: found.response_start] == tokenizer.encode_chat("1", None, tools)


def test_only_the_last_responses_of_large_files_are_in_memory(tmp_path, tokenizer):
    """Of a run, by step, without lines that a crash tore; of one file, where a torn line would be an error."""
    folder = tmp_path / "responses"
    folder.mkdir()
    rows = []
    for rank, count in enumerate((250, 241, 255)):
        mine = [{"step": i // 4, "prompt_token_ids": [rank], "token_ids": [i], "x": "a" * 999} for i in range(count)]
        lines, torn = "".join(json.dumps(row) + "\n" for row in mine), '{"step": 99, "prom' if rank else ""
        (folder / f"rank-{rank:05d}.jsonl").write_text(lines + torn)
        rows += mine
    rows.sort(key=lambda row: row["step"])
    for most in (1, 8, 30, 999):
        found = read_responses(config(), tmp_path, tokenizer, VOCAB, most)
        wanted = [[*row["prompt_token_ids"], *row["token_ids"]] for row in rows[-most:]]
        assert [t.token_ids.tolist() for t in found] == wanted
        assert np.isfinite(found[0].logprobs).all()
    for path in (tmp_path, folder / "rank-00000.jsonl"):
        tracemalloc.start()
        read_responses(config(), path, tokenizer, VOCAB, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


MESSAGES = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}]
IDS = {"prompt_token_ids": [1], "token_ids": [2, 3]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"promt": "a", "response": "b"}, "r.jsonl:2: field 'prompt' or 'prompt_token_ids' is missing.*'promt'"),
        ({"prompt": "a", "answer": "b"}, "r.jsonl:2: field 'response' must be a string.*'answer', 'prompt'"),
        ({"prompt": "a", "response": 3}, "field 'response' must be a string.*found int"),
        ({"prompt": 5, "response": "b"}, "field 'prompt' must be a string or a list of chat messages, found int"),
        ({"prompt": MESSAGES, "response": "b"}, "field 'prompt' must not end with a message of .*'response'"),
        ({"prompt": MESSAGES, "token_ids": [2]}, "field 'prompt' must not end with a message of .*'token_ids'"),
        ({"prompt": "a", "response": "b", "system": "S"}, "field 'system' does not reach the model"),
        (IDS | {"token_ids": [2, VOCAB]}, f"'token_ids' has ids 2 to {VOCAB}, the model has 0 to {VOCAB - 1}"),
        (IDS | {"token_ids": "2 3"}, "field 'token_ids' must be a list of integers"),
        (IDS | {"prompt_token_ids": []}, "field 'prompt_token_ids' has no tokens"),
        (IDS | {"token_ids": [2] * 64}, "65 tokens, model.max_context allows 64"),
        (IDS | {"given": [[1, 3]]}, "field 'given' must be ascending"),
        ({"messages": [{"role": "user", "content": "a"}]}, "must end with a message of the assistant"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, tokenizer, row, says):
    with pytest.raises(DataError, match=says):
        read(tmp_path / "r.jsonl", [row], tokenizer)


def test_a_run_without_responses_says_what_writes_them(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"observe\.save_responses=true"):
        read_responses(config(), tmp_path, tokenizer, VOCAB, 3)


def test_a_tool_in_a_conversation_is_given(tmp_path, tokenizer):
    texts = {"user": "1 + 2", "assistant": "call", "tool": "3"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    (found,) = read(tmp_path / "r.jsonl", [{"messages": [*messages, {"role": "assistant", "content": "3"}]}], tokenizer)
    drawn = found.token_ids[found.response_start :][found.drawn].tolist()
    end = [*tokenizer.eos_token_ids[:1]]
    assert drawn == [*tokenizer.encode("call"), *end, *tokenizer.encode("3"), *end]


def test_a_response_without_text_is_one_that_ends_at_once(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": ""}]
    for row in ({"prompt": "1 + 2", "response": ""}, {"messages": messages}):
        (found,) = read(tmp_path / "r.jsonl", [row], tokenizer)
        assert found.token_ids[found.response_start :].tolist() == [*tokenizer.eos_token_ids[:1]]

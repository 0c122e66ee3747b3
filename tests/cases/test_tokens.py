"""Token ids: ends of turns, beginnings of prompts, tokens without a row in the embedding, SentencePiece's spaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_tlt.config.data import DataSection, PromptSourceConfig
from megatron_tlt.config.root import Config, SftConfig, SftSection
from megatron_tlt.data.completions import read_sequences
from megatron_tlt.data.prompts import build_prompts, file_prompts
from megatron_tlt.data.responses import read_responses
from megatron_tlt.data.sources import FileSource
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.trainer.preflight import check_report
from tests.helpers.chat_models import DEMO_POLICY, edit_json, save_sentencepiece

ROWS = 288  # of its embedding
USER, TURN = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
TOOL = {"role": "tool", "content": "hello 3"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo policy, to edit."""
    return Path(shutil.copytree(DEMO_POLICY, tmp_path / "model"))


BOS = {"add_bos_token": True}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(model: Path, **data: Any) -> Config:
    train = {"kind": "jsonl", "path": data.pop("path")} if "path" in data else {"tasks": [{"name": "chain_sum"}]}
    rewards = {"functions": [{"name": "exact" if "path" in train else "task"}]}
    section = {"train": train, "max_prompt_tokens": 256, **data}
    rollout = {"max_tokens": 256, "speculation": {"drafter": "suffix"}}
    return Config.model_validate({"model": {"path": str(model), "max_context": 512}, "data": section,
                                  "rewards": rewards, "rollout": rollout})  # fmt: skip


def sft_tokens(path: Path, tokenizer: HFTokenizer, chat: bool = True) -> list[list[int]]:
    section = SftSection(train_path=str(path), out="", chat_template=chat)
    return [s.trajectory.token_ids.tolist() for s in read_sequences(section, path, "train", tokenizer, 300)[0]]


def test_sft_ends_turns_with_the_templates_token_of_several(model: Path, tmp_path: Path) -> None:
    edit_json(model / "generation_config.json", eos_token_id=[0, 1, 2])
    tokenizer, path = HFTokenizer(model), tmp_path / "r.jsonl"
    write(path, {"prompt": "1 + 2", "completion": "3"}, {"messages": [USER, TURN, TOOL, TURN]})
    single, turns = sft_tokens(path, tokenizer)
    reference = AutoTokenizer.from_pretrained(model)
    assert single == reference.apply_chat_template([USER, TURN], return_dict=False)
    assert turns == reference.apply_chat_template([USER, TURN, TOOL, TURN], return_dict=False)
    assert single[-1] == 2


@pytest.mark.parametrize("text", ["Calculate 1 + 1.", "<s> Calculate 1 + 1."])
@pytest.mark.parametrize(
    ("adds", "setting"),
    [("<s> $A", {}), ("<s> $A </s>", {}), ("$A </s>", {}), *((adds, BOS) for adds in ("$A", "<s> $A"))],
)
def test_a_prompt_without_template_begins_as_the_tokenizer_begins_it(
    adds: str, setting: dict[str, bool], text: str, tmp_path: Path
) -> None:
    """Or, as DeepSeek-R1-Distill-Qwen, as tokenizer_config.json says."""
    edit_json(save_sentencepiece(tmp_path / "t", None, adds=adds) / "tokenizer_config.json", **setting)
    tokenizer = HFTokenizer(tmp_path / "t")
    bare = AutoTokenizer.from_pretrained(tmp_path / "t").encode(text, add_special_tokens=False)
    wanted = bare if bare[0] == 1 or not (adds.startswith("<s>") or setting) else [1, *bare]
    path = write(tmp_path / "r.jsonl", {"prompt": text, "completion": "2", "response": "2"})
    data = DataSection(train=PromptSourceConfig(kind="jsonl", path=str(path)))
    (trained,) = build_prompts(data, "train", tokenizer, 0).next_batch(1)
    (generated,) = file_prompts(path, tokenizer, chat=False)
    assert [*trained.token_ids] == [*generated.token_ids] == wanted
    config = Config.model_validate({"model": {"path": str(tmp_path), "max_context": 64}})
    (drafted,) = read_responses(config, path, tokenizer, 999, 9)
    (learned,) = sft_tokens(path, tokenizer)
    assert drafted.token_ids.tolist() == learned
    digit = tokenizer.encode_behind("a", "2")
    assert learned == [*wanted, *digit, 2], "the response begins with nothing, and ends with eos_token"


def test_a_template_gets_no_second_beginning(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer = HFTokenizer(save_sentencepiece(tmp_path, template))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode_chat("1 + 2") == reference.apply_chat_template([USER], return_dict=False)
    assert tokenizer.encode_chat("1 + 2").count(1) == 1
    demo = HFTokenizer(DEMO_POLICY)
    assert demo.encode_prompt("1 + 2") == demo.encode("1 + 2")


def add_tokens(model: Path, special: bool = False) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(12)], special_tokens=special)
    tokenizer.save_pretrained(model)


@pytest.mark.parametrize("special", [False, True])
def test_a_token_without_a_row_is_refused_where_it_stands(special: bool, model: Path, tmp_path: Path) -> None:
    add_tokens(model, special)
    fine, bad = {"prompt": "1 + 1", "answer": "2", "completion": "2"}, {"prompt": "<extra_11> 1", "answer": "2"}
    assert "warning: 5 added tokens of" in check_report(config_of(model), 1)
    path = write(tmp_path / "r.jsonl", fine, {**bad, "completion": "3"})
    place = rf"{path}:2: the token '<extra_11>' with id 292 has no row in the model's embedding of 288 rows"
    for chat in (True, False):
        with pytest.raises(ConfigError, match=rf"^data\.train\.path = .*{place}"):
            check_report(config_of(model, path=str(path), chat_template=chat), 1)
    tokenizer = HFTokenizer(model, ROWS)
    with pytest.raises(DataError, match=place):
        file_prompts(path, tokenizer, chat=True)
    with pytest.raises(DataError, match=rf"{path}:1: token id 999 has no row"):
        file_prompts(write(path, {"token_ids": [5, 999]}), tokenizer, chat=True)
    if not special:  # a special one is broken by a space
        with pytest.raises(DataError, match="the token '<extra_11>' with id 292 has no row"):
            TurnTokens(tokenizer, chat=True, max_observation_tokens=9).given("<extra_11>", "user", [])
    records = write(tmp_path / "s.jsonl", fine, {"prompt": "1", "completion": "<extra_11>"})
    sft = {"train_path": str(records), "out": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match=rf"^sft\.train_path = .*{records}:2: the token '<extra_11>'"):
        check_report(SftConfig.model_validate({"model": {"path": str(model), "max_context": 512}, "sft": sft}), 1)


def test_a_tokenizer_of_another_model_and_special_tokens_without_a_row_are_refused(model: Path) -> None:
    edit_json(model / "generation_config.json", eos_token_id=[2, 300])
    with pytest.raises(ConfigError, match=r"^model\.path = .*its eos_token_id has id 300, but the model's embedding"):
        check_report(config_of(model), 1)
    edit_json(model / "generation_config.json", eos_token_id=2)
    add_tokens(model)
    template = model / "chat_template.jinja"
    template.write_text("<extra_11>" + template.read_text())
    with pytest.raises(ConfigError, match=r"its chat template writes a token that the model lacks: .*'<extra_11>'"):
        check_report(config_of(model), 1)
    assert "Ranks: 1" in check_report(config_of(model, chat_template=False), 1)
    save_sentencepiece(model / "other", None)
    vocabulary = json.loads((model / "other/tokenizer.json").read_text())
    vocabulary["model"]["vocab"] |= {f"w{i}": 200 + i for i in range(200)}
    (model / "other/tokenizer.json").write_text(json.dumps(vocabulary))
    config = config_of(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": str(model / "other")})})
    with pytest.raises(ConfigError, match=r"^model\.tokenizer = .*tokenizer of another model: 112 of its tokens"):
        check_report(config, 1)


def test_a_template_that_ends_turns_without_a_stop_token_is_said(model: Path) -> None:
    assert "warning: the chat template" not in check_report(config_of(model), 1)
    for name in ("generation_config.json", "config.json"):
        edit_json(model / name, eos_token_id=0)
    edit_json(model / "tokenizer_config.json", eos_token="<|pad|>")
    report = check_report(config_of(model), 1)
    remedy = f"add 2 to eos_token_id in {model / 'generation_config.json'}"
    assert f"with '<|end|>', which is no stop token ('<|pad|>'): {'a response runs on'}" in report and remedy in report
    environment = config_of(model).model_copy(update={"env": {"kind": "calculator", "max_observation_tokens": 64}})
    with pytest.raises(ConfigError, match="ends no turn of the assistant with a stop token"):
        check_report(Config.model_validate(environment.model_dump()), 1)
    edit_json(model / "config.json", eos_token_id=[0, 2])  # where the engine stops, too
    assert "Ranks: 1" in check_report(Config.model_validate(environment.model_dump()), 1)
    edit_json(model / "config.json", eos_token_id=0)
    edit_json(model / "generation_config.json", eos_token_id=[0, 2])
    assert "warning: the chat template" not in check_report(config_of(model), 1)


def test_end_tokens_of_the_model_count_beside_a_tokenizer_of_another_directory(model: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(model, tmp_path / "own"))
    for file in (own / "generation_config.json", own / "config.json", model / "config.json"):
        edit_json(file, eos_token_id=0)
    edit_json(own / "tokenizer_config.json", eos_token="<|pad|>")
    config = config_of(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": str(own)})})
    for ends, is_said in ([0, 2], False), (0, True):
        edit_json(model / "generation_config.json", eos_token_id=ends)
        assert ("with '<|end|>', which is no stop token" in check_report(config, 1)) is is_said
    edit_json(model / "generation_config.json", eos_token_id="end")
    with pytest.raises(ConfigError, match=rf"model\.tokenizer = .*{model}/generation_config.json: eos_token_id"):
        check_report(config, 1)


MIXTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{ ' [T] ' + m.content + ' [/T]' }}
{%- else %}{{ HEAD + m.content + eos_token }}{% endif %}{% endfor %}"""
ZEPHYR = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
LLAMA_2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    "template",
    [MIXTRAL.replace("HEAD", "''"), MIXTRAL.replace("HEAD", "' '"), ZEPHYR, LLAMA_2],
    ids=["mixtral", "mixtral with a space", "zephyr", "llama 2"],
)
def test_responses_are_those_of_the_rendered_conversation(template: str, scheme: str, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save_sentencepiece(tmp_path / "t", template, scheme))
    reference = AutoTokenizer.from_pretrained(tmp_path / "t")
    user, conversations = {"role": "user", "content": "hello hello"}, []
    for text in ("hello", "I say hello\nhello", " hello "):
        turn = {"role": "assistant", "content": text}
        conversations += [[user, turn], [user, turn, TOOL, turn]]
    path = write(tmp_path / "r.jsonl", *({"messages": messages} for messages in conversations))
    prompt = tokenizer.encode_chat((user,))
    for found, messages in zip(sft_tokens(path, tokenizer), conversations, strict=True):
        rendered = reference.apply_chat_template(messages, return_dict=False)
        assert found == rendered[: len(found)]
        assert found[-1] == 2 and 2 not in rendered[len(found) :], "up to the last end of a turn"
        assert found[: len(prompt)] == prompt, "the prompt of a rollout"


def test_check_reads_rows_and_tokenizer_once_and_gives_the_template_its_variables(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = model / "chat_template.jinja"
    template.write_text("{{ style + '' }}" + template.read_text())
    read: list[str] = []
    for kind in (FileSource, HFTokenizer):
        init = kind.__init__

        def counted(*args: Any, init: Any = init, **named: Any) -> None:
            read.append(init.__qualname__)
            init(*args, **named)

        monkeypatch.setattr(kind, "__init__", counted)
    path = write(tmp_path / "r.jsonl", {"prompt": "1 + 1", "answer": "2"})
    check_report(config_of(model, path=str(path), chat_template_kwargs={"style": "x"}), 1)
    assert sorted(read) == ["FileSource.__init__", "HFTokenizer.__init__"]


_TURNS = """{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}ANSWER{{- '<|end|>' }}
{%- else %}{{- '<|user|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>OPEN' }}{%- endif %}"""
# Qwen3's: a thought is spelled anew; the last turn has an empty one without it.
_QWEN3 = """{%- set thought, content = '', m.content %}{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.last or thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}"""
HYBRID = _TURNS.replace("ANSWER", _QWEN3).replace("OPEN", "")
THINKING = _TURNS.replace("ANSWER", _QWEN3).replace("OPEN", "<think>\\n")
SILENT = _TURNS.replace("ANSWER", _QWEN3).replace("OPEN", "<think>\\n\\n</think>\\n\\n")  # enable_thinking: false
DISTILLED = _TURNS.replace("ANSWER", "{{- m.content.split('</think>')[-1] }}").replace("OPEN", "<think>\\n")  # R1
CHANNELS = _TURNS.replace("ANSWER", "{{- '<|pad|>final:' + m.content }}").replace("OPEN", "")  # gpt-oss
THOUGHT, EMPTY = "<think>\nHm.\n</think>\n\n3", "<think>\n\n</think>\n\n3"


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        (HYBRID, "3", EMPTY),
        (HYBRID, THOUGHT, THOUGHT),
        (HYBRID, THOUGHT.removeprefix("<think>\n"), THOUGHT),
        (HYBRID, "<think>Hm.</think>3", THOUGHT),
        (THINKING, "3", EMPTY),
        (THINKING, THOUGHT, THOUGHT),
        (THINKING, THOUGHT.removeprefix("<think>\n"), THOUGHT),
        (THINKING, "<think>Hm.</think>3", THOUGHT),
        (SILENT, "3", EMPTY),
        (SILENT, EMPTY, EMPTY),
        (DISTILLED, "3", EMPTY),
        (DISTILLED, THOUGHT, THOUGHT),
        (CHANNELS, "3", "<|pad|>final:3"),
    ],
)
def test_a_response_has_the_thought_or_channel_that_the_template_writes(
    template: str, text: str, wanted: str, model: Path, tmp_path: Path
) -> None:
    (model / "chat_template.jinja").write_text(template)
    tokenizer, reference = HFTokenizer(model), AutoTokenizer.from_pretrained(model)
    messages = [USER, {"role": "assistant", "content": text}]
    (found,) = sft_tokens(write(tmp_path / "r.jsonl", {"messages": messages}), tokenizer)
    assert found == tokenizer.encode(f"<|user|>1 + 2<|end|><|assistant|>{wanted}<|end|>")
    if template != DISTILLED:
        assert found == reference.apply_chat_template(messages, return_dict=False)
    if template == SILENT:  # its model draws no thought
        return
    row = {"prompt": "1 + 2", "response": THOUGHT}
    config = Config.model_validate({"model": {"path": str(model), "max_context": 256}})
    (drawn,) = read_responses(config, write(tmp_path / "d.jsonl", row), tokenizer, 999, 9)
    assert drawn.token_ids.tolist() == tokenizer.encode(f"<|user|>1 + 2<|end|><|assistant|>{THOUGHT}<|end|>")


def test_earlier_turns_and_those_of_a_base_model_are_the_templates(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(HYBRID)
    for name in ("generation_config.json", "config.json"):
        edit_json(model / name, eos_token_id=0)
    edit_json(model / "tokenizer_config.json", eos_token="<|pad|>")  # Qwen2.5's base models: <|endoftext|>
    messages = [USER, TURN, TOOL, TURN]
    (found,) = sft_tokens(write(tmp_path / "r.jsonl", {"messages": messages}), HFTokenizer(model))
    assert found == AutoTokenizer.from_pretrained(model).apply_chat_template(messages, return_dict=False)


def test_turns_before_tools_are_those_of_a_rollout(model: Path, tmp_path: Path) -> None:
    """Thoughts that the template keeps are the rendered conversation; what it opens, each turn has, as in RL with
    `env.rewritten_history: keep`; what it writes before a text, it writes beside tools, too.
    """
    thinks, tools = {**TURN, "content": THOUGHT}, [{"type": "function", "function": {"name": "f"}}]
    begin, between = "<|user|>1 + 2<|end|><|assistant|>", "<|end|><|user|>hello 3<|end|><|assistant|>"
    for template, turn, wanted in (
        (HYBRID, thinks, THOUGHT),
        (THINKING, thinks, THOUGHT),
        (THINKING, TURN, EMPTY),
        (SILENT, TURN, EMPTY),
        (CHANNELS, TURN, "<|pad|>final:3"),
    ):
        (model / "chat_template.jinja").write_text("{{- tools | tojson if tools }}" + template)
        tokenizer, messages = HFTokenizer(model), [USER, turn, TOOL, turn]
        path = write(tmp_path / "r.jsonl", {"messages": messages}, {"messages": messages, "tools": tools})
        plain, shown = sft_tokens(path, tokenizer)
        assert plain == tokenizer.encode(f"{begin}{wanted}{between}{wanted}<|end|>")
        assert shown[-len(plain) :] == plain and len(shown) > len(plain)
        if turn is thinks:
            assert plain == AutoTokenizer.from_pretrained(model).apply_chat_template(messages, return_dict=False)


def test_an_observation_has_the_tokens_that_the_template_gives_it(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save_sentencepiece(tmp_path, MIXTRAL.replace("HEAD", "''")))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    turns = TurnTokens(tokenizer, chat=True, max_observation_tokens=99, roles=("tool",))
    prompt, drawn = tokenizer.encode_chat("hello"), [*tokenizer.encode_behind("]", "hello"), 2]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}, TOOL]
    wanted = reference.apply_chat_template(messages, return_dict=False)
    assert [*prompt, *drawn, *turns.given("hello 3", "tool", drawn)] == wanted
    plain = TurnTokens(tokenizer, chat=False, max_observation_tokens=99)
    assert [*tokenizer.encode("a"), *plain.given("hello", "user", [])] == tokenizer.encode("a\nhello\n")

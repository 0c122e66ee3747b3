"""Prompt streams: order, epochs, resuming, dropped prompts, and messages about bad files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron_tlt.config.data import DataSection, PromptSourceConfig, TaskConfig
from megatron_tlt.config.root import SftConfig
from megatron_tlt.data.chat import with_system
from megatron_tlt.data.completions import encoded_records
from megatron_tlt.data.prompts import (
    EnvPrompts,
    build_prompts,
    first_row,
    held_out_prompts,
    open_source,
    source_problems,
)
from megatron_tlt.data.sources import Row, unread_warning
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.errors import DataError, OpeningError
from megatron_tlt.models.decoders.keys import request_key
from megatron_tlt.types import Prompt
from tests.helpers.chat_models import DEMO_POLICY, chat_model

TASKS = PromptSourceConfig(tasks=(TaskConfig(name="chain_sum"),))
# Its generator gives up on a few items, the first of this seed at 9.
MAZES = PromptSourceConfig(tasks=(TaskConfig(name="maze", params={"min_dist": 12, "max_dist": 20}),), seed=1)


class Letters:
    """One token a character; a chat is the text in brackets."""

    eos_token_ids = (0,)
    vocab_size = 256
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_prompt = encode

    def encode_chat(self, prompt: Any, system: str | None = None, tools: Any = ()) -> list[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode("".join(f"{m['role'][0]}:{m['content']} " for m in with_system(messages, system)))

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


class Plain(Letters):
    has_chat_template = False


def test_an_environment_adds_its_text_and_drops_prompts_that_become_too_long() -> None:
    seeds: list[int] = []

    def openings(prompts: Sequence[Prompt]) -> list[str | None]:
        seeds.extend(p.seed for p in prompts)
        return ["!" * (1 if p.prompt_id % 2 else 99) for p in prompts]

    section = DataSection(train=PromptSourceConfig(kind="env"), max_prompt_tokens=20)
    made = build_prompts(section, "train", Letters(), 3, EnvPrompts(openings=openings))  # type: ignore[arg-type]
    seeds.clear()
    prompts = made.next_batch(2)
    assert [(p.prompt_id, p.text, bytes(p.token_ids)) for p in prompts] == [(1, "!", b"u:! "), (3, "!", b"u:! ")]
    assert {p.row_text for p in prompts} == {""}
    assert [p.seed for p in prompts] == [seeds[1], seeds[3]]
    assert len(set(seeds)) == len(seeds)
    assert all(seed < 2**31 for seed in seeds)
    other = build_prompts(section, "train", Letters(), 4, EnvPrompts(openings=openings)).next_batch(1)  # type: ignore[arg-type]
    assert other[0].seed != prompts[0].seed
    long = EnvPrompts(openings=lambda prompts: ["!" * 99 for _ in prompts])
    with pytest.raises(DataError, match="with the environment's text fits"):
        build_prompts(section, "train", Letters(), 3, long)  # type: ignore[arg-type]


def test_each_prompt_is_opened_once_also_where_it_was_looked_at_before() -> None:
    asked: list[int] = []

    def openings(prompts: Sequence[Prompt]) -> list[str | None]:
        asked.extend(p.prompt_id for p in prompts)
        return ["!" * (99 if p.prompt_id % 3 == 2 else 1 + p.prompt_id) for p in prompts]

    section = DataSection(train=PromptSourceConfig(kind="env"), max_prompt_tokens=30)
    plain, made = (build_prompts(section, "train", Letters(), 3, EnvPrompts(openings=openings)) for _ in "ab")  # type: ignore[arg-type]
    expected = [plain.next_batch(4) for _ in range(3)]
    asked.clear()
    for step, batch in enumerate(expected):
        assert made.next_batch(4) == batch
        ahead = [prompt for later in expected[step + 1 :] for prompt in later]
        assert made.peek(len(ahead)) == ahead == made.peek(len(ahead))
    assert sorted(asked) == sorted(set(asked)) and not made._texts, "and none is kept"


@pytest.mark.parametrize("openings", [None, lambda prompts: [None] * len(prompts), lambda prompts: [""] * len(prompts)])
def test_only_a_prompt_of_a_row_needs_no_text_of_the_environment(ten: PromptSourceConfig, openings: Any) -> None:
    env = EnvPrompts(openings=openings)
    with pytest.raises(OpeningError, match="reset returned no text"):
        build_prompts(DataSection(train=PromptSourceConfig(kind="env")), "train", Letters(), 3, env)  # type: ignore[arg-type]
    prompts = build_prompts(DataSection(train=ten), "train", Letters(), 3, env).next_batch(4)  # type: ignore[arg-type]
    assert prompts == stream(ten, seed=3).next_batch(4)


def test_the_opening_of_a_chat_ends_its_last_message_of_the_user() -> None:
    first = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    messages = (*first, {"role": "user", "content": "c"})
    row = Row("d:0", "c", None, "d", {}, messages).with_opening("o")
    assert (row.prompt, row.messages) == ("c\n\no", (*first, {"role": "user", "content": "c\n\no"}))


def stream(source: PromptSourceConfig, seed: int = 0, tokenizer: Letters | None = None, **section: Any) -> Any:
    return build_prompts(DataSection(train=source, **section), "train", tokenizer or Letters(), seed)


def write_jsonl(path: Path, records: list[Any]) -> PromptSourceConfig:
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    return PromptSourceConfig(kind="jsonl", path=str(path))


@pytest.fixture
def ten(tmp_path: Path) -> PromptSourceConfig:
    return write_jsonl(tmp_path / "ten.jsonl", [{"prompt": f"q{i}", "answer": i, "level": i % 3} for i in range(10)])


def test_ids_count_draws_and_epochs_are_shuffled_anew(ten: PromptSourceConfig) -> None:
    prompts = stream(ten).next_batch(30)
    assert [p.prompt_id for p in prompts] == list(range(30))
    epochs = [[p.text for p in prompts[i : i + 10]] for i in (0, 10, 20)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    keys = {request_key(0, p.prompt_id, 0) for p in prompts}
    assert len(keys) == 30, "a prompt's noise in one epoch is not that of another: exploration would narrow"
    assert len({p.dataset_id for p in prompts}) == 10


def test_prompts_of_a_finite_source_come_again(ten: PromptSourceConfig) -> None:
    for source, repeats in ((ten, True), (TASKS, False)):
        prompts = (made := stream(source)).next_batch(30)
        assert made.repeats == repeats == (len({p.dataset_id for p in prompts}) < 30)


def test_splits_of_one_data_set_share_no_names(tmp_path: Path) -> None:
    names: set[str] = set()
    for split in ("train", "test"):
        path = tmp_path / split / "rows.jsonl"
        path.parent.mkdir()
        names |= {p.dataset_id for p in stream(write_jsonl(path, [{"prompt": split, "answer": 1}])).next_batch(1)}
    assert len(names) == 2


@pytest.mark.parametrize("cut", [0, 1, 7, 10, 23])
def test_resuming_continues_exactly(ten: PromptSourceConfig, cut: int) -> None:
    for source in (ten, TASKS, MAZES):
        whole = stream(source).next_batch(40)
        first = stream(source)
        first.next_batch(cut)
        second = stream(source)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.next_batch(40 - cut) == whole[cut:]


@pytest.mark.parametrize("size", [1, 7, 10, 23])
def test_a_peek_sees_the_next_batch_and_moves_nothing(
    ten: PromptSourceConfig, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over the ends of epochs, with dropped rows, ids included; the log says the same as without it."""
    caplog.set_level(logging.INFO)
    drops = write_jsonl(tmp_path / "drops.jsonl", [{"prompt": f"q{i}" * (1 + i % 2)} for i in range(10)])
    for source in (ten, TASKS, MAZES, drops):
        logs = []
        for peeks in (False, True):
            caplog.clear()
            made = stream(source, max_prompt_tokens=2 if source is drops else 999, chat_template=False)
            batches = []
            for _ in range(4):
                ahead = made.peek(size) if peeks else None
                batches.append(made.next_batch(size))
                assert ahead in (None, batches[-1])
            logs.append((batches, [record.message for record in caplog.records]))
        assert logs[0] == logs[1]


def test_an_item_that_cannot_be_drawn_is_dropped(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """As a prompt that is too long is: counted, and an error where none of many in a row is left."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("megatron_tlt.data.prompts._MOST_DROPS_IN_A_ROW", 20)
    train = stream(MAZES).next_batch(19)
    held_out = build_prompts(DataSection(train=TASKS, eval=MAZES), "eval", Letters(), 0)  # type: ignore[arg-type]
    assert [p.dataset_id.rpartition(":")[2] for p in train] == [str(i) for i in range(20) if i != 9]
    assert [p.prompt_id for p in train] == [*range(19)]
    assert len(held_out.next_batch(40)) == 40
    assert "of the last 20 rows, 1 exceed data.max_prompt_tokens = 1024 or could not be drawn (last: " in caplog.text
    assert "task 'maze', item 9: the generator failed: RuntimeError" in caplog.text
    small = {"min_dist": 18, "max_dist": 18, "min_grid_size": 5, "max_grid_size": 6}
    never = PromptSourceConfig(tasks=(TaskConfig(name="maze", params=small),))
    monkeypatch.setattr("megatron_tlt.data.tasks.first_drawn", lambda *given: {"answer": None})  # which refuses it
    for read in (stream, lambda source: first_row(open_source(source, "data.train", 0))):
        with pytest.raises(DataError, match=r"item .*: the generator failed: RuntimeError"):
            read(never)
    assert first_row(open_source(MAZES, "data.train", 75)).dataset_id.endswith(":1")


def test_resuming_on_other_data_is_refused(ten: PromptSourceConfig, tmp_path: Path) -> None:
    state = stream(ten).state_dict()
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "q", "answer": 1}])
    for changed in (other, ten.model_copy(update={"shuffle": False}), ten.model_copy(update={"seed": 9}), TASKS):
        with pytest.raises(DataError, match=r"(?s)belongs to other prompts.*ten\.jsonl.*train\.run_dir"):
            stream(changed).load_state_dict(state)
    with pytest.raises(DataError):
        stream(ten, seed=5).load_state_dict(state)
    moved = Path(str(ten.path)).rename(tmp_path / "moved.jsonl")
    stream(ten.model_copy(update={"path": str(moved)})).load_state_dict(state)  # the same data


def test_train_and_held_out_streams_differ_and_held_out_ignores_the_run_seed() -> None:
    section = DataSection(train=TASKS, eval=TASKS)

    def first(which: Any, seed: int) -> list[str]:
        return [p.text for p in build_prompts(section, which, Letters(), seed).next_batch(50)]

    assert not set(first("train", 0)) & set(first("eval", 0))
    assert first("train", 0) != first("train", 1)
    assert first("eval", 0) == first("eval", 1)


def test_a_held_out_file_is_gone_through_once(tmp_path: Path, ten: PromptSourceConfig, caplog: Any) -> None:
    held_out = write_jsonl(tmp_path / "h.jsonl", [{"prompt": "x" * n} for n in (3, 50, 5, 60)])
    section = DataSection(train=ten, eval=held_out, max_prompt_tokens=10)
    prompts = build_prompts(section, "eval", Letters(), 0)
    assert sorted(len(p.text) for p in prompts.next_batch(64)) == [3, 5]
    assert prompts.next_batch(1) == []
    assert not caplog.messages
    caplog.set_level(logging.INFO)  # as on the first rank
    assert prompts.next_batch(1) == [] and "only 0 prompts left of 1 requested" in caplog.text
    with pytest.raises(DataError, match="max_prompt_tokens = 2"):  # before a run writes anything
        build_prompts(section.model_copy(update={"max_prompt_tokens": 2}), "eval", Letters(), 0)
    long = EnvPrompts(openings=lambda prompts: ["!" * 99 for _ in prompts])
    with pytest.raises(
        DataError, match=r"no prompt with the environment's text fits into data\.max_prompt_tokens = 10"
    ):
        held_out_prompts(section, Letters(), 64, long)  # type: ignore[arg-type]


SAY = [{"role": "user", "content": "hi", "name": None}]
EARLIER = [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "yes?"}]
TURNS = [{"role": "system", "content": "S"}, *EARLIER, *SAY]
RESPONSE = {"role": "assistant", "content": "bye"}


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        (SAY, None, "u:hi "),
        (SAY, "D", "s:D u:hi "),
        (TURNS, "D", "s:S u:ho a:yes? u:hi "),  # its own system message counts
        ([*TURNS, RESPONSE], None, "s:S u:ho a:yes? u:hi "),  # the response of a row for fine-tuning is left out
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_may_be_chat_messages(
    tmp_path: Path, kind: Any, messages: list[Any], system: str | None, expected: str
) -> None:
    records = [{"messages": messages, "about": {"gold": {"value": 7}}, "level": 3}]
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "chat.jsonl", records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chat.parquet")
        source = PromptSourceConfig(kind=kind, path=str(tmp_path / "chat.parquet"))
    source = source.model_copy(update={"prompt_field": "messages", "answer_field": "about.gold.value"})
    (prompt,) = stream(source, system_prompt=system).next_batch(1)
    assert (Letters().decode(prompt.token_ids), prompt.text, prompt.answer) == (expected, "hi", "7")
    whole = [{name: m[name] for name in ("role", "content")} for m in messages if m != RESPONSE]
    assert (prompt.metadata["level"], prompt.metadata["messages"]) == (3, whole)
    if len(messages) > 1:
        with pytest.raises(DataError, match=r"chat messages need data\.chat_template and a tokenizer"):
            stream(source, tokenizer=Plain())
    elif system is None:
        assert Letters().decode(stream(source, tokenizer=Plain()).next_batch(1)[0].token_ids) == "hi"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


BARE: list[dict[str, Any]] = [{"name": "add", "parameters": {"type": "object"}}]
FLAT = [{"type": "function", **BARE[0]}]
NO_TOOLS = (None, " ", "[]")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), json.dumps(BARE), FLAT, *NO_TOOLS])
@pytest.mark.parametrize("kind", ["jsonl", "hf"])
def test_the_tools_of_a_row_are_in_its_prompt_as_in_fine_tuning(tmp_path: Path, kind: Any, tools: Any) -> None:
    template = "{{ '<|system|>' + tools | tojson if tools }}" + (DEMO_POLICY / "chat_template.jinja").read_text()
    tokenizer, path = HFTokenizer(chat_model(tmp_path / "m", template)), tmp_path / f"rows.{kind}"
    record = {"messages": [*SAY, RESPONSE], "tools": tools}
    write_jsonl(path, [record]) if kind == "jsonl" else datasets.Dataset.from_list([record]).save_to_disk(str(path))
    config = SftConfig.model_validate({"model": {"path": "m"}, "sft": {"train_path": str(path), "out": "o"}})
    ((_, _, (learned, _, _)),) = encoded_records(config.sft, path, "train", tokenizer, 999)
    source = PromptSourceConfig(kind=kind, path=str(path), prompt_field="messages")
    (prompt,) = stream(source, tokenizer=tokenizer).next_batch(1)  # type: ignore[arg-type]
    assert [*prompt.token_ids] == learned == tokenizer.encode_chat("hi", None, () if tools in NO_TOOLS else TOOLS)


def test_tools_of_a_row_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "r.jsonl", [{"prompt": SAY, "tools": TOOLS}])
    with pytest.raises(DataError, match=r"r\.jsonl:1: field 'tools': 1 tools need data\.chat_template"):
        stream(source, tokenizer=Plain())
    text = write_jsonl(tmp_path / "text.jsonl", [{"prompt": "q", "tools": TOOLS}])
    rendered = stream(text, tokenizer=Plain()).next_batch(1)[0].token_ids
    assert Letters().decode(rendered) == "q", "a text without the template stands as it is"
    section, env = DataSection(train=source), EnvPrompts(tools=TOOLS)
    with pytest.raises(DataError, match=r"r\.jsonl:1: field 'tools': the environment has tools of its own \(add\)"):
        build_prompts(section, "train", Letters(), 0, env)  # type: ignore[arg-type]
    plain = [{"prompt": "q"}]
    saved = stream(write_jsonl(tmp_path / "plain.jsonl", plain)).state_dict()
    with pytest.raises(DataError, match="belongs to other prompts"):
        stream(source).load_state_dict(saved)
    with pytest.raises(DataError, match=r"bad\.jsonl:1: field 'tools' must be a list of"):
        stream(write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "q", "tools": "add"}]))


@pytest.mark.parametrize(
    ("prompt", "run", "is_taken"),
    [
        ("<|system|>You are X.<|end|><|user|>q", None, True),
        ([{"role": "system", "content": "You are X.\nToday is Monday."}, *SAY], None, True),
        ("q", "You are X.", True),
        (SAY, "You are X.", True),
        ("q", "You are Y.", False),
        ([{"role": "system", "content": "You are Y."}, *SAY], "You are X.", False),
    ],
)
def test_a_system_column_is_taken_where_its_text_reaches_the_model(
    tmp_path: Path, prompt: Any, run: str | None, is_taken: bool
) -> None:
    data = DataSection(
        train=write_jsonl(tmp_path / "r.jsonl", [{"prompt": prompt, "system": "You are X.\n"}]), system_prompt=run
    )
    if is_taken:
        assert build_prompts(data, "train", Letters(), 0).next_batch(1)  # type: ignore[arg-type]
        assert not source_problems(data.train, "data.train", system=run)
        return
    with pytest.raises(DataError, match=r"r\.jsonl:1: field 'system' does not .*data\.system_prompt has one text"):
        build_prompts(data, "train", Letters(), 0)  # type: ignore[arg-type]


def test_a_directory_of_parquet_is_one_split_of_it(tmp_path: Path) -> None:
    for split, rows in (("train", [{"prompt": "q0"}, {"prompt": "q1"}]), ("test", [{"prompt": "q2"}])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    more = [{"prompt": "q3", "answer": "3"}]  # a column that the first file lacks
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(more), tmp_path / "train_2.parquet")
    for name in ("train_example.json", "rest.json"):  # others' sample of a split beside it: no file of this kind
        (tmp_path / name).write_text('[{"prompt": "q4"}]')
    found = stream(PromptSourceConfig(kind="parquet", path=str(tmp_path), shuffle=False)).next_batch(3)
    assert [(prompt.text, prompt.answer) for prompt in found] == [("q0", None), ("q1", None), ("q3", "3")]
    shutil.copy(tmp_path / "test.parquet", tmp_path / "rest.parquet")
    warning = unread_warning(PromptSourceConfig(kind="parquet", path=str(tmp_path)), "data.train")
    assert warning is not None and "not read: rest.parquet;" in warning


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_table_with_images_is_refused_by_their_column(tmp_path: Path, kind: Any) -> None:
    picture = datasets.List(datasets.Image())
    features = datasets.Features({"prompt": datasets.Value("string"), "views": picture, "none": datasets.Image()})
    columns = {"prompt": ["<image>Find x."] * 2, "views": [[], [{"bytes": b"x", "path": None}]], "none": [None] * 2}
    table = datasets.Dataset.from_dict(columns, features=features)
    path = tmp_path / "rows"
    table.to_parquet(path) if kind == "parquet" else table.save_to_disk(path)
    with pytest.raises(DataError, match="rows: column 'views' is of type Image and not empty"):
        stream(PromptSourceConfig(kind=kind, path=str(path)))
    table = table.select([0]).flatten_indices()
    path = tmp_path / "texts"
    table.to_parquet(path) if kind == "parquet" else table.save_to_disk(path)
    assert stream(PromptSourceConfig(kind=kind, path=str(path))).next_batch(1)[0].text == "<image>Find x."


BAD_LINES = [
    ('{"prompt": "a"}\n{broken\n', r"bad\.jsonl:2: not a JSON object"),
    ('{"prompt": "a"}\n\n[1]\n', r"bad\.jsonl:3: expected a JSON object, found list"),
    ('{"prompt": "a"}\n{"promt": "b"}\n', r"bad\.jsonl:2: no field 'prompt'; there are 'promt'$"),
    ('{"prompt": [1]}\n', r"bad\.jsonl:1: field 'prompt': message 0 must have a role \(system, user"),
    ('{"prompt": [{"role": "user", "content": [1]}]}\n', r"message 0 has a part of type .int. in content: only"),
    ('{"prompt": [{"role": "system", "content": "a"}]}\n', r"field 'prompt': no message of a user"),
    ('{"prompt": ""}\n', r"bad\.jsonl:1: .*found an empty string"),
    ('{"prompt": "a", "system": "S"}\n', r"bad\.jsonl:1: field 'system' does not reach the model"),
    ('{"prompt": "a", "images": []}\n{"prompt": "a", "images": ["b"]}\n', r"bad\.jsonl:2: field 'images' is not empty"),
    ("", r"bad\.jsonl: no records"),
]


@pytest.mark.parametrize(("content", "message"), BAD_LINES)
def test_errors_name_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        stream(PromptSourceConfig(kind="jsonl", path=str(tmp_path / "bad.jsonl")))


def test_other_bad_sources(tmp_path: Path, ten: PromptSourceConfig) -> None:
    misspelt = pyarrow.table({"prompts": ["q"], "answer": ["1"]})
    pyarrow.parquet.write_table(misspelt, tmp_path / "typo.parquet")
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"prompt": ["q"]})}).save_to_disk(str(tmp_path / "d"))
    cases = [
        ("jsonl", "missing.jsonl", "no such file"),
        ("jsonl", "empty", "is a directory"),
        ("parquet", "missing.parquet", "no such file"),
        ("parquet", "typo.parquet", "typo.parquet:0: no field 'prompt'; there are 'answer', 'prompts'"),
        ("hf", "missing", "no such directory"),
        ("hf", "empty", "no split 'train'; there are: none"),
        ("hf", "d", "no split 'train'; there are: test"),
    ]
    for kind, name, message in cases:
        with pytest.raises(DataError, match=message):
            stream(PromptSourceConfig(kind=kind, path=str(tmp_path / name)))
    with pytest.raises(DataError, match=r"answer field 'anwser'.*'answer'"):
        stream(ten.model_copy(update={"answer_field": "anwser"}))

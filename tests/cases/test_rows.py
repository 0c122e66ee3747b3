"""Rows of real users' data files: spellings of numbers, broken text, forms of files, several answers."""

from __future__ import annotations

import bz2
import csv
import datetime
import decimal
import gzip
import json
import lzma
import runpy
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_tlt.config.data import PromptSourceConfig, RewardConfig, RewardSection
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import SftConfig, SftSection
from megatron_tlt.data.chat import as_messages
from megatron_tlt.data.completions import read_completions
from megatron_tlt.data.prompts import file_prompts
from megatron_tlt.data.responses import read_responses
from megatron_tlt.data.sources import Row, open_file, unread_warning
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.envs.retry import Retry
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.observe.jsonl import to_line
from megatron_tlt.observe.rollouts import sample_rows
from megatron_tlt.rewards.build import build_scorers
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.trainer.preflight import input_problems
from megatron_tlt.types import Prompt, Sample, SampleGroup
from tests.helpers.chat_models import DEMO_POLICY as POLICY


def rows(path: Path, kind: Any = "jsonl", **fields: Any) -> list[Row]:
    source = open_file(PromptSourceConfig(kind=kind, path=str(path), **fields), path)
    assert source.size is not None
    return [source.row(index) for index in range(source.size)]


def answers(path: Path, kind: Any = "jsonl", **fields: Any) -> list[Any]:
    return [row.answer for row in rows(path, kind, **fields)]


def jsonl(path: Path, *values: str) -> Path:
    path.write_text("".join(f'{{"prompt": "p", "answer": {value}}}\n' for value in values))
    return path


def sample(text: str) -> Sample:
    return Sample(0, 0, [1], [0.0], text, "stop", 0)


def reward(name: Any, answer: Any, text: str, **fields: Any) -> float:
    (named,) = build_scorers(RewardSection(functions=(RewardConfig(name=name, **fields),)))
    return float(named.scorer(Prompt(0, "d", (), "p", answer), sample(text)))  # type: ignore[arg-type]


SPELLED = {
    "0.00001": "0.00001", "1e-05": "0.00001", "1E-7": "0.0000001", "2e16": "20000000000000000", "18.0": "18.0",
    "0.10": "0.10", "3": "3", "true": "true", "false": "false", "null": None, '"1e-05"': "1e-05",
    "0.1000000000000000055511151231257827": "0.1000000000000000055511151231257827",
    "123456789012345678901234567890": "123456789012345678901234567890", "1e999999": "1e999999",
    '["1/2", 0.5, 5e-1]': ("1/2", "0.5", "0.5"),
}  # fmt: skip


def test_answers_of_json_are_spelled_as_in_the_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *SPELLED)
    assert answers(path) == [*SPELLED.values()]
    assert [prompt.answer for prompt in file_prompts(path, HFTokenizer(POLICY), chat=False)] == [*SPELLED.values()]
    (tmp_path / "d").mkdir()
    shutil.copy(path, tmp_path / "d/train.jsonl")
    assert answers(tmp_path / "d", "hf") == [*SPELLED.values()]


@pytest.mark.parametrize(
    ("value", "response"), [("1e-05", "0.00001"), ("2e+16", "20000000000000000"), ("true", "true"), ("18.0", "18.0")]
)
def test_the_right_response_to_a_number_gets_1(tmp_path: Path, value: str, response: str) -> None:
    (answer,) = answers(jsonl(tmp_path / "a.jsonl", value))
    assert reward("exact", answer, response) == 1
    if value != "true":  # no mathematics
        assert reward("math", answer, response, pattern="(.+)") == 1


def test_columns_beside_the_answer_stay_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "x": {"answer": 1e-5}, "level": [2.50, {"a": 1e-3}]}\n')
    (row,) = rows(path, answer_field="x.answer")
    assert (row.answer, row.metadata) == ("0.00001", {"x": {"answer": 1e-5}, "level": [2.5, {"a": 0.001}]})
    assert type(row.metadata["level"][0]) is float


ONE = ["p"]
TABLES = [
    (pa.array([1e-5]), "0.00001"),
    (pa.array([0.1], pa.float32()), "0.1"),
    (pa.array([0.1], pa.float16()), "0.1"),
    (pa.array([True]), "true"),
    (pa.array([decimal.Decimal("0.10")]), "0.10"),
    (pa.array([datetime.date(2024, 1, 5)]), "2024-01-05"),
    (pa.array([["1/2", "0.5"]]), ("1/2", "0.5")),
    (pa.array([None], pa.float64()), None),
]


@pytest.mark.parametrize(("column", "answer"), TABLES)
def test_answers_of_parquet_are_plain_decimals(tmp_path: Path, column: pa.Array, answer: Any) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": ONE, "answer": column}), tmp_path / "a.parquet")
    assert answers(tmp_path / "a.parquet", "parquet") == [answer]


def test_single_precision_within_a_struct_is_spelled_shortly(tmp_path: Path) -> None:
    column = pa.array([{"truth": 0.1}], pa.struct([("truth", pa.float32())]))
    pyarrow.parquet.write_table(pa.table({"prompt": ONE, "x": column}), tmp_path / "a.parquet")
    assert answers(tmp_path / "a.parquet", "parquet", answer_field="x.truth") == ["0.1"]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("NaN", "found nan, which is no number"),
        ("[-Infinity]", "found -inf, which is no number"),
        ("[]", "found an empty list"),
        ('["a", null]', "found null in it"),
        ("[[1]]", "found list"),
        ('{"a": 1}', "found an object with 'a', of which FIELD.KEY names one"),
    ],
)
def test_what_is_no_answer_is_refused_by_name(tmp_path: Path, value: str, found: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", "1", value)
    for read in (answers, lambda path: file_prompts(path, HFTokenizer(POLICY), chat=False)):
        with pytest.raises(DataError, match="or a list of these that are all acceptable") as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}:2: field 'answer' must be a string")
        assert str(caught.value).endswith(found)


CELLS = ["00501", "0.10", "5", "true", "9" * 30, "10:30", "2024-01-05", "", "NA", "None", "1e5", 'a, "b"\nc']


@pytest.mark.parametrize(("name", "delimiter"), [("train.csv", ","), ("train.tsv", "\t"), ("train.csv.gz", ",")])
def test_cells_of_csv_are_the_text_of_the_file(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    with (gzip.open if name.endswith("gz") else open)(path, "wt", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("prompt", "answer", "n"), *((1, c, 2) for c in CELLS)])
    found = rows(tmp_path, "hf")
    assert [(row.prompt, row.answer, row.metadata) for row in found] == [("1", cell, {"n": 2}) for cell in CELLS]
    sft = SftSection(train_path="x", out="x", completion_field="n")
    assert read_completions(sft, tmp_path, "train")[0][0].turns == ("2",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prompt;answer\na;1\n", r"only column is 'prompt;answer': commas \(.tsv: tabs\) separate columns, not ';'"),
        ("prompt,answer,answer\na,1,2\n", "names a column twice: 'answer'"),
        ("prompt, answer\na,1\n", "has blanks around names: ' answer'"),
        ("What is 1?,1\n2?,2\n", "no field 'prompt'; there are '1', 'What is 1"),
        ("prompt,answer\na,1,2\n", "Expected 2 columns, got 3"),
    ],
)
def test_csv_of_another_form_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(DataError, match=problem):
        rows(tmp_path, "hf")


ROW = b'{"prompt": "p", "answer": "1"}\n'
ZSTD = pa.compress(ROW, codec="zstd", asbytes=True)
PACKED = {"gz": gzip.compress(ROW), "bz2": bz2.compress(ROW), "xz": lzma.compress(ROW), "zst": ZSTD}


def test_packed_files_and_lists_are_read_beside_others(tmp_path: Path) -> None:
    (tmp_path / "train-0.jsonl").write_bytes(ROW)
    for number, (ending, data) in enumerate(PACKED.items(), start=1):
        (tmp_path / f"train-{number}.jsonl.{ending}").write_bytes(data)
        assert answers(tmp_path / f"train-{number}.jsonl.{ending}") == ["1"]
        (tmp_path / "cut.jsonl").write_bytes(data[:-6])
        with pytest.raises(DataError, match=r"cut.jsonl: cannot be read"):
            answers(tmp_path / "cut.jsonl")
    (tmp_path / "cut.jsonl").unlink()
    (tmp_path / "train-5.json").write_text(json.dumps([{"prompt": "p", "answer": 1e-5}], indent=2))
    assert answers(tmp_path, "hf") == ["1"] * 5 + ["0.00001"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("train-1.arrow", "split 'train' has files that cannot be read: train-1.arrow; what can: .parquet, .jsonl"),
        ("train.txt", "cannot be read: train.txt"),
        ("train.jsonl.lz4", "cannot be read: train.jsonl.lz4"),
        ("train-0.jsonl.gz", "train-0.jsonl and train-0.jsonl.gz, which may hold the same rows"),
        ("train-1.csv", r"mixes formats: csv, json \(train-0.jsonl, train-1.csv\)"),
    ],
)
def test_no_file_of_a_split_is_left_out_silently(tmp_path: Path, name: str, problem: str) -> None:
    for other in ("README.md", "notes.txt", "dataset_infos.json", "LICENSE"):
        (tmp_path / other).write_text("{}")
    (tmp_path / "train-0.jsonl").write_bytes(ROW)
    assert answers(tmp_path, "hf") == ["1"]
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=problem):
        rows(tmp_path, "hf")


def test_files_that_belong_to_no_split_are_named(tmp_path: Path) -> None:
    for name in ("part-0.jsonl", "notes.txt", "README.md"):
        (tmp_path / name).write_bytes(ROW)
    source = PromptSourceConfig(kind="hf", path=str(tmp_path))
    assert unread_warning(source, "data.train") is None  # all are one split
    (tmp_path / "train.jsonl").write_bytes(ROW)
    warning = unread_warning(source, "data.train")
    assert warning is not None
    assert f"data.train.path = {tmp_path}: not read: part-0.jsonl;" in warning


def test_missing_shards_are_named(tmp_path: Path) -> None:
    for number in (0, 2):
        (tmp_path / f"train-0000{number}-of-00003.jsonl").write_bytes(ROW)
    source = PromptSourceConfig(kind="hf", path=str(tmp_path))
    warning = unread_warning(source, "data.train")
    assert warning is not None
    assert warning.endswith("not there, by the names of others: train-00001-of-00003")
    (tmp_path / "train-00001-of-00003-0a1b2c.jsonl").write_bytes(ROW)
    assert unread_warning(source, "data.train") is None


LONE = r"\ud83d"
IN_PROMPT = f'{{"prompt": "1{LONE}7", "answer": "1"}}'
IN_ANSWER = f'{{"prompt": "1", "answer": ["1", "{LONE}"]}}'
IN_MESSAGE = f'{{"prompt": [{{"role": "user", "content": "{LONE}"}}]}}'
IN_COMPLETION = f'{{"prompt": "1", "completion": "{LONE}"}}'
IN_RESPONSE = f'{{"prompt": "1", "response": "{LONE}"}}'
PAIR = r"\ud83d\ude00"


def second_line(path: Path, line: str) -> Path:
    path.write_text('{"prompt": "' + PAIR + '", "answer": "1", "completion": "a", "response": "b"}\n' + line + "\n")
    return path


@pytest.mark.parametrize("line", [IN_PROMPT, IN_ANSWER, IN_MESSAGE])
def test_a_lone_surrogate_of_a_prompt_is_named_before_a_model_is_loaded(tmp_path: Path, line: str) -> None:
    path = second_line(tmp_path / "a.jsonl", line)
    problem = r"a.jsonl:2: field '(prompt|prompt.0.content|answer.1)' has a lone surrogate, \\ud83d at character [01]"
    with pytest.raises(DataError, match=problem):
        file_prompts(path, HFTokenizer(POLICY), chat=True)
    data = {"train": {"kind": "jsonl", "path": str(path)}}
    functions = [{"name": "exact"}]
    config = build_config({"model": {"path": "x"}, "data": data, "rewards": {"functions": functions}})
    shutil.copy(path, tmp_path / "train.jsonl")
    in_directory = PromptSourceConfig(kind="hf", path=str(tmp_path), split="train")
    with pytest.raises(DataError, match="train.jsonl:2: field".replace(".", r"\.")):
        open_file(in_directory, tmp_path)
    (found,) = input_problems(config)
    with pytest.raises(DataError, match=problem):
        raise DataError(found.allowed)


def test_a_lone_surrogate_is_named_in_records_responses_and_settings(tmp_path: Path) -> None:
    path = second_line(tmp_path / "a.jsonl", IN_COMPLETION)
    sft = build_config({"model": {"path": "x"}, "sft": {"train_path": str(path), "out": "x"}}, (), SftConfig)
    assert "a.jsonl:2: field 'completion' has a lone surrogate" in input_problems(sft)[0].allowed
    config = build_config({"model": {"path": str(POLICY)}, "data": {"train": {"tasks": [{"name": "chain_sum"}]}}})
    with pytest.raises(DataError, match=r"a.jsonl:2: field 'response' has a lone surrogate"):
        read_responses(config, second_line(path, IN_RESPONSE), HFTokenizer(POLICY), 10**6, 9)
    with pytest.raises(ConfigError, match=r"data\.system_prompt = 'a\\ud83d': has a lone surrogate, .*UTF-8"):
        build_config({"model": {"path": "x"}, "data": {"system_prompt": "a\ud83d"}})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (ROW.decode().encode("utf-16"), "a.jsonl: is UTF-16 text, must be UTF-8"),
        (ROW.decode().encode("utf-16-le"), "a.jsonl:1: not a JSON object: .* it has NUL bytes"),
        (ROW + '{"prompt": "caf\u00e9"}'.encode("cp1252"), r"a.jsonl:2: not a JSON object: .*byte 0xe9 .* in UTF-8\)"),
        (ROW + b"\0" * 9, "a.jsonl:2: not a JSON object: .* it has NUL bytes"),
        (b'[\n{"prompt": "a"},\n{"prompt": }]', "a.jsonl:3: not a JSON object"),
        (b'{\n "data": [{"prompt": "a"}]}', "a.jsonl:1: .* one JSON object a line, or one list of them"),
        (b"PAR1", "is a Parquet file"),
    ],
)
def test_bytes_that_are_no_text_are_named(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=problem):
        rows(tmp_path / "a.jsonl")


def test_byte_order_marks_and_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + ROW.replace(b"\n", b"\r\n") * 2)
    assert answers(tmp_path / "a.jsonl") == ["1", "1"]


def test_strings_of_parquet_that_are_no_text_are_named(tmp_path: Path) -> None:
    offsets = pa.array([0, 3], pa.int32()).buffers()[1]
    lone = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xed\xa0\xbd")])
    pyarrow.parquet.write_table(pa.table({"prompt": ONE, "level": lone}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: .*Invalid UTF8"):
        rows(tmp_path / "a.parquet", "parquet")


def test_any_acceptable_answer_is_right(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", '["A: 1/2", "A: 50 %"]')
    (answer,) = answers(path, answer_pattern="A: (.*)")
    assert answer == ("1/2", "50 %")
    assert [reward("exact", answer, text) for text in ("1/2", "50 %", "0.5")] == [1, 1, 0]
    assert [reward("math", ("7", "1/2"), text) for text in ("$7$", "$0.5$", "$8$")] == [1, 1, 0]
    environment = Retry()
    environment.reset(Prompt(0, "d", (), "p", answer), 0)
    assert environment.step("<answer>50 %</answer>").reward == 1


def test_users_and_logs_get_a_list_of_acceptable_answers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(prompt, answer, response, metadata): return answer == ['a', 'b']\n")
    pool = RewardPool(RewardSection(functions=(RewardConfig(name="python", path=f"{tmp_path / 'mine.py'}:f"),)))
    group = SampleGroup(Prompt(0, "d", (), "p", ("a", "b")), [sample("x")])
    try:
        pool.score([group])
    finally:
        pool.close()
    assert group.rewards[0].value == 1
    assert json.loads(to_line(sample_rows([group], 1)[0]))["answer"] == ["a", "b"]


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """A row of a conversation in which a tool was called, with the tool's schema."""
    parameters = {"type": "object", "properties": {key: {"enum": [value]} for key, value in arguments.items()}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    return {"messages": messages, "tools": tools, "x": {"chat": messages}}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "clone", "json columns"])
def test_calls_and_schemas_have_the_keys_of_their_own_row(tmp_path: Path, form: str) -> None:
    """Structs of Arrow have the keys of all rows, those of others as null. JSON has nulls of its own."""
    own = {"note": None} if form in ("jsonl", "json columns") else {}
    given = [called("f", a=1, **own), called("g", b="two", c=["three", None])]
    path, kind = tmp_path / "r.jsonl" if form == "jsonl" else tmp_path / "rows", "hf"
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in given))
        kind = "jsonl"
    elif form in ("saved", "json columns"):
        mixed: Any = "use_json" if form == "json columns" else None
        datasets.Dataset.from_list(given, on_mixed_types=mixed).save_to_disk(path)
    else:
        path.mkdir()
        pyarrow.parquet.write_table(pa.Table.from_pylist(given), path / "train.parquet")
        kind = "parquet" if form == "parquet" else "hf"
    expected = [as_messages(row["messages"][:4]) for row in given]
    assert [row.messages for row in rows(path, kind, prompt_field="messages")] == expected
    assert [row.messages for row in rows(path, kind, prompt_field="x.chat")] == expected
    if form != "parquet":  # fine-tuning has a clone in its place
        read, _ = read_completions(SftSection(train_path=str(path), out=""), path, "train")
        assert [row.prompt for row in read] == expected
        assert [[*row.tools] for row in read] == [row["tools"] for row in given]


def test_schemas_of_tools_come_with_a_completion_as_with_a_conversation(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
    asked, said = [{"role": "user", "content": "1 + 2"}], "<tool_call>add</tool_call>"
    forms = {"prompt": asked, "completion": said}, {"messages": [*asked, {"role": "assistant", "content": said}]}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({**form, "tools": tools}) + "\n" for form in forms))
    pair, conversation = read_completions(SftSection(train_path=str(path), out=""), path, "train")[0]
    assert pair == conversation
    assert [*pair.tools] == tools


def test_a_reward_of_verl_judges_verl_s_rows(tmp_path: Path) -> None:
    """The guide's function around `compute_score`, and what the guide says of prepared rows."""
    guide = (POLICY.parents[1] / "docs/guides/gpu_cluster.md").read_text()
    block = guide.partition("```python\n")[2].partition("```")[0]
    code = tmp_path / "own.py"
    score = "{'score': float(solution_str == ground_truth), 'of': data_source, 'split': extra_info['split']}"
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    code.write_text(f"{head} return {score}\n{block}")
    row = {
        "data_source": "own",
        "prompt": [{"role": "user", "content": "1 + 2"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0},
    }
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (found,) = rows(tmp_path / "train.parquet", "parquet", answer_field="reward_model.ground_truth")
    (named,) = build_scorers(RewardSection(functions=(RewardConfig(name="python", path=f"{code}:reward"),)))
    prompt = Prompt(0, "d", (), "1 + 2", found.answer, metadata=found.metadata)
    assert [named.scorer(prompt, sample(text)) for text in ("3", "4")] == [1.0, 0.0]


def test_the_slurm_example_keeps_the_commas_of_an_answer() -> None:
    """Coordinates and intervals are other answers without them; of a thousand `math` reads both spellings."""
    to_prompt = runpy.run_path(str(POLICY.parents[1] / "examples/slurm_7b/prompts.py"))["to_prompt"]
    worked = {"question": "Where?", "answer": "It is there.\n#### (1,-2)"}
    found = [to_prompt(worked)["answer"], to_prompt({"problem": "How many?", "answer": "1,000"})["answer"]]
    assert found == ["(1,-2)", "1,000"]
    solved = {"problem": "How much?", "level": "Level 1", "solution": r"So $\boxed{2}$, thus $\boxed{\frac{1}{2}}$."}
    assert to_prompt(solved)["answer"] == r"\frac{1}{2}"
    with pytest.raises(ValueError, match='needs "question" or "problem", and "answer" or "solution"; it has problem'):
        to_prompt({"problem": "What?"})
    assert [reward("math", found[0], rf"\boxed{{{text}}}") for text in ("(1,-2)", "(1-2)")] == [1.0, 0.0]
    assert reward("math", found[1], r"\boxed{1000}") == 1.0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_without_an_answer_field_a_column_of_any_form_reaches_the_reward(tmp_path: Path, kind: str) -> None:
    values: list[Any] = [{"cases": [[1], []]}, {"cases": []}]
    given = [{"prompt": "p", "answer": value} for value in values]
    path = tmp_path / f"r.{kind}"
    if kind == "jsonl":
        values += [[], [[1.5]]]
        given = [{"prompt": "p", "answer": value} for value in values]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(given), path)
    found = rows(path, kind, answer_field=None)
    assert [(row.answer, row.metadata) for row in found] == [(None, {"answer": value}) for value in values]
    with pytest.raises(DataError, match=r"\(answer_field: null gives the column to rewards as it is"):
        rows(path, kind)


def test_rows_of_the_hub_have_the_data_set_s_name(tmp_path: Path) -> None:
    folder = tmp_path / "datasets--openai--gsm8k/snapshots" / ("0a" * 20)
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(ROW)
    (row,) = rows(folder, "hf")
    assert row.task == "openai/gsm8k" and row.dataset_id.startswith("openai/gsm8k:")

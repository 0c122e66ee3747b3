"""Which files of a published data set make up a subset's split, and their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from megatron_tlt.config.data import PromptSourceConfig
from megatron_tlt.data.dataset_files import choose_files, read_dataset_files
from megatron_tlt.data.sources import open_file
from megatron_tlt.errors import DataError


def card(*configs: str) -> str:
    return "\n".join(["---", "license: mit", "configs:", *(f"- {config}" for config in configs), "---", "# About"])


BY_SPLIT = "{config_name: a, data_files: [{split: train, path: a/train-*}, {split: test, path: [a/t1.csv, a/t2.csv]}]}"
DEFAULT = "{config_name: b, default: true, data_files: [b/x.json, b/y.json]}"
FOLDER = "{config_name: c, data_dir: c}"
ANYWHERE = "{config_name: d, data_files: 'd/**/*.parquet'}"
ALL = card(BY_SPLIT, DEFAULT, FOLDER, ANYWHERE)
HERE = "{config_name: e, data_files: '*.jsonl'}"


@pytest.mark.parametrize(
    ("text", "names", "subset", "split", "expected"),
    [
        (ALL, "a/train-1.csv a/train-0.csv a/test.csv b/x.json", "a", None, "a/train-0.csv a/train-1.csv"),
        (ALL, "a/t2.csv a/t1.csv a/t3.csv", "a", "test", "a/t1.csv a/t2.csv"),
        (ALL, "b/x.json b/y.json b/z.json", None, None, "b/x.json b/y.json"),
        (ALL, "c/train.jsonl c/dev.jsonl train.jsonl", "c", "validation", "c/dev.jsonl"),
        (ALL, "d/0.parquet d/e/1.parquet 2.parquet", "d", None, "d/0.parquet d/e/1.parquet"),
        (card(HERE), "0.jsonl test/0.jsonl", None, None, "0.jsonl"),
        (card(BY_SPLIT), "a/train-1.csv", None, None, "a/train-1.csv"),  # the only one
        ("", "rows.parquet more.parquet notes.txt .cache/x.parquet", None, None, "more.parquet rows.parquet"),
        ("", "data/train-0.parquet data/test-0.parquet", None, "test", "data/test-0.parquet"),
        ("", "x_eval.jsonl contest.jsonl", None, "test", "x_eval.jsonl"),
        ("", "en/train.jsonl cn/train.jsonl", "en", None, "en/train.jsonl"),
        ("# No front matter", "train.jsonl", None, None, "train.jsonl"),
    ],
)
def test_card_or_names_tell_splits(
    tmp_path: Path, text: str, names: str, subset: str | None, split: str | None, expected: str
) -> None:
    (tmp_path / "README.md").write_text(text)
    assert choose_files(names.split(), tmp_path / "README.md", subset, split, "x") == expected.split()


@pytest.mark.parametrize(
    "names",
    [
        "data/train_sft-00000-of-00001.csv data/train_gen-00000-of-00001.csv data/test_sft-00000-of-00001.csv",
        "data/train-00000-of-00002.parquet data/train-00001-of-00002-0a1b.parquet data/x-00000-of-00001.parquet",
        "data/test-00000-of-00001.jsonl data/train.jsonl en/train.jsonl",
        "train_sft-00000-of-00001.parquet data/more/train_gen-00000-of-00001.parquet test_sft-00000-of-00001.parquet",
    ],
)
@pytest.mark.parametrize("folder", ["", "c/"])
def test_shards_name_their_splits_as_in_datasets(tmp_path: Path, names: str, folder: str) -> None:
    files = [f"{folder}{name}" for name in names.split()]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    base = str(tmp_path / folder)
    theirs = DataFilesDict.from_patterns(get_data_patterns(base), base)
    with pytest.raises(DataError) as caught:
        choose_files(files, tmp_path / "README.md", folder.strip("/") or None, "no", "x")
    assert str(caught.value) == f"x: no split 'no'; there are: {', '.join(sorted(map(str, theirs)))}"
    for split, paths in theirs.items():
        ours = choose_files(files, tmp_path / "README.md", folder.strip("/") or None, split, "x")
        assert {str(tmp_path / file) for file in ours} == {*paths}


@pytest.mark.parametrize(
    ("text", "subset", "split", "message"),
    [
        (ALL, "z", None, "x: no subset 'z'; there are: a, b, c, d"),
        (card(BY_SPLIT, FOLDER), None, None, "x: `subset` must name one of its subsets; there are: a, c"),
        (ALL, "a", "dev", "x: no split 'dev'; there are: train"),
        ("", None, "test", "x: no split 'test'; there are: train"),
        (card("{config_name: a, data_files: 'a**'}"), None, None, "x: data_files of README.md: Invalid pattern"),
        (card("{name: a}"), None, None, "x: README.md does not describe its subsets: KeyError"),
        ("---\nconfigs: [\n---\n", None, None, "x: README.md does not describe its subsets: ConfigError"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    tmp_path: Path, text: str, subset: str | None, split: str | None, message: str
) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(DataError) as caught:
        choose_files(["a/train-0.csv"], tmp_path / "README.md", subset, split, "x")
    assert message in str(caught.value)


def test_cells_of_csv_may_be_long_and_a_column_s_last_one_of_another_type(tmp_path: Path) -> None:
    long = "x" * 3_000_000
    (tmp_path / "train.csv").write_text(f'prompt,level\n"{long}",1\nq,2\nq,two\n')
    rows, _ = read_dataset_files(tmp_path, None, None, ("prompt",))
    assert [(row["prompt"] == long, row["level"]) for row in rows] == [(True, "1"), (False, "2"), (False, "two")]


ONE = pyarrow.array(["p"])
UNHEARD = {"info": {"features": {"prompt": {"dtype": "string", "_type": "Unheard"}}}}
WITHOUT_FORM = {
    "maps": pyarrow.table(
        {"prompt": ONE, "x": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))}
    ),
    "an unknown type": pyarrow.table({"prompt": ONE}).replace_schema_metadata({"huggingface": json.dumps(UNHEARD)}),
}


@pytest.mark.parametrize("form", WITHOUT_FORM)
def test_columns_that_rows_cannot_have_are_an_error_with_the_path(tmp_path: Path, form: str) -> None:
    pyarrow.parquet.write_table(WITHOUT_FORM[form], tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"^{tmp_path}: "):
        read_dataset_files(tmp_path, None, None, ("prompt",))
    path = tmp_path / "train.parquet"
    with pytest.raises(DataError, match=f"^{path}: "):
        open_file(PromptSourceConfig(kind="parquet", path=str(path)), path)

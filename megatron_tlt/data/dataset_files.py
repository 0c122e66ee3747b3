"""The files of a data set in its published form: which belong to a subset and split, and their rows.

The front matter of README.md lists them (`configs`), in a repository of the hub and in a clone of one; without such a
list, names of files tell splits apart, as in `datasets`: `data/SPLIT-00000-of-00001.parquet`, else by a word for one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fsspec.utils import glob_translate

from megatron_tlt.config.paths import FORMATS, KINDS, PACKED
from megatron_tlt.config.yaml_reader import parse_yaml
from megatron_tlt.data.json_files import UNREADABLE, open_text, read_json
from megatron_tlt.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow

Where = Callable[[int], str]
"""The place of row i in its file or directory, for messages."""
CARD = "README.md"
_READABLE = f"{', '.join(KINDS)} (text also {', '.join(PACKED)})"
# Rows that cannot be read, and are not left out without a word either; texts where their name is one of a split.
_TEXTS = (".txt",)
_OTHER_FORMATS = (
    *_TEXTS, *PACKED, ".arrow", ".feather", ".orc", ".avro", ".zip", ".tar", ".tgz", ".7z", ".lz4", ".sz", ".snappy",
    ".xls", ".xlsx", ".pkl", ".npy", ".npz", ".h5", ".db", ".sqlite", ".tfrecord", ".msgpack",
)  # fmt: skip
_ABOUT = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json")  # of `datasets`: no rows
DEFAULT_SPLIT = "train"
_CSV_BLOCK = 2**28  # bytes: a row must fit into one, and the first one tells the types of columns
_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})")
_SHARD_OF_SPLIT = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*")

_FRONT_MATTER = re.compile(r"---[^\n]*\n(.*?)\n---", re.DOTALL)
# Words of file names that stand for a split.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}


def choose_files(names: Sequence[str], card: Path, subset: str | None, split: str | None, where: str) -> list[str]:
    """The data files, of `names` (paths below the data set's root), of a subset and split (None: train).

    `card`: README.md, which may be missing. Raises DataError that begins with `where` and lists what there is.
    """
    data = [name for name in names if _is_data(name)]
    chosen = _subset_of(_configs(card, where), subset, where)
    splits = {name: files for name, files in _splits(chosen, data, where).items() if files}
    wanted = split or DEFAULT_SPLIT
    if wanted not in splits:
        there = ", ".join(sorted(splits)) or f"none, with files of {_READABLE}"
        raise DataError(f"{where}: no split {wanted!r}; there are: {there}")
    _check_files(splits[wanted], f"{where}: split {wanted!r}")
    return sorted(splits[wanted])


def _is_data(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and name.endswith((*FORMATS, *_OTHER_FORMATS)) and PurePosixPath(name).name not in _ABOUT


def _check_files(names: Sequence[str], where: str) -> None:
    """Raises DataError where only some of a split's files can be read, or where two may hold the same rows."""
    unread = sorted(name for name in names if not name.endswith(FORMATS))
    if unread:
        raise DataError(f"{where} has files that cannot be read: {', '.join(unread)}; what can: {_READABLE}")
    stems = defaultdict(list)
    for name in sorted(names):
        stems[name.removesuffix(next(ending for ending in FORMATS if name.endswith(ending)))].append(name)
    for same in stems.values():
        if len(same) > 1:
            raise DataError(f"{where} has {' and '.join(same)}, which may hold the same rows: keep one of them")


def unread_files(directory: Path, subset: str | None, ending: str = "") -> list[str]:
    """Files of rows in a clone without a card's list that no split reads: others name their split, these do not. Only
    names with `ending` count.
    """
    names = [name for name in _names_in(directory, ending) if _is_data(name) and not name.endswith(_TEXTS)]
    where = str(directory)
    config = _subset_of(_configs(directory / CARD, where), subset, where)
    splits = {} if "data_files" in config else _splits(config, names, where)
    inside = [name for name in names if name.startswith(str(config.get("data_dir") or ""))]
    read = {name for files in splits.values() for name in files}
    return sorted({*inside} - read) if read else []


def missing_shards(directory: Path) -> list[str]:
    """Shards that others' names count (train-00000-of-00003.parquet) and that are not there."""
    found = [shard.groups() for name in _names_in(directory) if _is_data(name) and (shard := _SHARD.match(name))]
    return [
        f"{begin}{number:05}-of-{total}"
        for begin, total in sorted({(begin, total) for begin, _, total in found})
        for number in range(int(total))
        if (begin, f"{number:05}", total) not in found
    ]


def _names_in(directory: Path, ending: str = "") -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob(f"*{ending}") if path.is_file()]


def read_dataset_files(
    directory: Path, subset: str | None, split: str | None, texts: Sequence[str], ending: str = ""
) -> tuple[Any, Where]:
    """(rows of a subset and split of a clone of a data set, in memory: mappings; their places). Raises DataError.

    Only files whose names have `ending` count. `texts`: columns whose cells are not interpreted in files that have no
    types: 00501 is not 501. Numbers of JSON are `JsonNumber`s.
    """
    chosen = choose_files(_names_in(directory, ending), directory / CARD, subset, split, str(directory))
    kinds = {kind for name in chosen for ending, kind in KINDS.items() if name.endswith((ending, *_packed(ending)))}
    if len(kinds) > 1:
        split = split or DEFAULT_SPLIT
        raise DataError(f"{directory}: split {split!r} mixes formats: {', '.join(sorted(kinds))} ({', '.join(chosen)})")
    paths = [directory / name for name in chosen]
    if kinds == {"json"}:
        read = [(path, *found) for path in paths for found in zip(*read_json(path, spelled=True), strict=True)]
        return [record for _, record, _ in read], lambda row: f"{read[row][0]}:{read[row][2]}"
    table, where = _read_tables(paths, kinds.pop(), texts)
    return rows_of(table, directory), where


def rows_of(table: pyarrow.Table, path: Path) -> Any:
    """The rows of a table from `path`, as mappings. Raises DataError for what `datasets` has no form of, as columns of
    maps and of types that the file names and the library lacks; see `of_text`, too.
    """
    import datasets

    try:
        return of_text(datasets.Dataset(table), path)
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as rows: {error}") from error


def of_text(rows: Any, path: Path) -> Any:
    """`rows`, a table. Raises DataError for a column of images, audio or video with any; a row would decode them."""
    import datasets

    for name, feature in rows.features.items():
        of_cell = getattr(feature, "feature", feature)
        is_media = isinstance(of_cell, datasets.Image | datasets.Audio | datasets.Video)
        if is_media and any(cell.as_py() for cell in rows.data.column(name)):
            kind = type(of_cell).__name__
            raise DataError(f"{path}: column {name!r} is of type {kind} and not empty: models read text only")
    return rows


def _packed(ending: str) -> list[str]:
    return [f"{ending}{packed}" for packed in PACKED]


def _read_tables(paths: Sequence[Path], kind: str, texts: Sequence[str]) -> tuple[pyarrow.Table, Where]:
    import pyarrow

    delimiter = "\t" if kind == "tsv" else ","
    tables = [read_parquet(path) if kind == "parquet" else _read_csv(path, delimiter, texts) for path in paths]
    begins = [*accumulate((table.num_rows for table in tables), initial=0)]
    try:
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{paths[0].parent}: the columns of {names} differ: {error}") from error

    def where(row: int) -> str:
        file = bisect_right(begins, row) - 1
        return f"{paths[file]}:{row - begins[file]}"

    return table, where


def read_parquet(path: Path) -> pyarrow.Table:
    """A file, checked to the last character. Raises DataError."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error
    return table


def _read_csv(path: Path, delimiter: str, texts: Sequence[str]) -> pyarrow.Table:
    """Columns `texts` as the file spells their cells, types of the others as they look. Raises DataError."""
    import pyarrow
    import pyarrow.csv

    block = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK)
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    types = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
    try:
        with open_text(path) as file:
            table = pyarrow.csv.read_csv(file, block, parse, types)
    except (*UNREADABLE, ValueError) as error:  # pyarrow's own are ValueErrors
        raise DataError(f"{path}: cannot be read: {error}") from error
    columns = table.column_names
    double = sorted({name for name in columns if columns.count(name) > 1})
    if double:
        raise DataError(f"{path}: its first line names a column twice: {', '.join(map(repr, double))}")
    if blank := [name for name in columns if name not in texts and name.strip() in texts]:
        raise DataError(f"{path}: its first line has blanks around names: {', '.join(map(repr, blank))}")
    if len(columns) == 1 and (found := re.search(r"[,;\t|]", columns[0])) is not None:
        needed = "tabs (.csv: commas)" if delimiter == "\t" else "commas (.tsv: tabs)"
        raise DataError(f"{path}: its only column is {columns[0]!r}: {needed} separate columns, not {found[0]!r}")
    return table


def _configs(card: Path, where: str) -> dict[str, Mapping[str, Any]]:
    """Subsets by name, as the front matter of the card describes them; none where it does not."""
    front = _FRONT_MATTER.match(card.read_text(encoding="utf-8-sig")) if card.is_file() else None
    if front is None:
        return {}
    try:
        about = parse_yaml(front[1], CARD) or {}
        return {str(config["config_name"]): config for config in about.get("configs") or ()}
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: {CARD} does not describe its subsets: {error!r}") from error


def _subset_of(configs: Mapping[str, Mapping[str, Any]], subset: str | None, where: str) -> Mapping[str, Any]:
    """The description of a subset; of the default one for None. A data set without descriptions has folders."""
    if not configs:
        return {} if subset is None else {"data_dir": subset}
    if subset is None:
        marked = [name for name, config in configs.items() if config.get("default")]
        subset = (marked or [name for name in configs if name == "default" or len(configs) == 1] or [""])[0]
    if subset not in configs:
        asked = f"no subset {subset!r}" if subset else "`subset` must name one of its subsets"
        raise DataError(f"{where}: {asked}; there are: {', '.join(configs)}")
    return configs[subset]


def _splits(config: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, list[str]]:
    """The files of every split of a subset: by the patterns of its description, else by the names of shards, else by
    words in the names of files.

    Raises DataError that begins with `where` for a pattern that is none.
    """
    patterns, folder = config.get("data_files"), str(config.get("data_dir") or "").strip("/")
    if patterns is None:
        base = folder and f"{folder}/"
        inside = [name for name in names if name.startswith(base)]
        by_shard = defaultdict(list)
        for name in inside:
            if shard := _SHARD_OF_SPLIT.fullmatch(name, len(base)):
                by_shard[shard[1]].append(name)
        if by_shard:
            return by_shard
        by_word = {split: [n for n in inside if _has_word(n, words)] for split, words in _SPLIT_WORDS.items()}
        if any(by_word.values()):
            return by_word
        return {DEFAULT_SPLIT: [name for name in inside if not name.endswith(_TEXTS)]}
    found: dict[str, list[str]] = {}
    for entry in [patterns] if isinstance(patterns, str) else patterns:
        split, globs = (DEFAULT_SPLIT, entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        try:
            wanted = [glob_translate(str(glob)) for glob in ([globs] if isinstance(globs, str) else globs)]
        except ValueError as error:
            raise DataError(f"{where}: data_files of {CARD}: {error}") from error
        files = [name for name in names if any(re.match(glob, name) for glob in wanted)]
        found[split] = [*found.get(split, []), *files]
    return found


def _has_word(name: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"(?<![a-z]){word}(?![a-z])", name.lower()) for word in words)

"""The files of a data set in its published form: which belong to a subset and split, and their rows.

The front matter of README.md lists them (`configs`), in a repository of the hub and in a clone of one; without such a
list, names of files tell splits apart: `data/train-00000-of-00001.parquet`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_tlt.config.yaml_reader import parse_yaml
from megatron_tlt.errors import ConfigError, DataError

CARD = "README.md"
FORMATS = (".parquet", ".jsonl", ".json", ".csv")
DEFAULT_SPLIT = "train"

_FRONT_MATTER = re.compile(r"---[^\n]*\n(.*?)\n---", re.DOTALL)
# Words of file names that stand for a split.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}


def choose_files(
    names: Sequence[str], card: Path, subset: str | None, split: str | None, where: str
) -> list[str]:
    """The data files, of `names` (paths below the data set's root), of a subset and split (None: train).

    `card`: README.md, which may be missing. Raises DataError that begins with `where` and lists what there is.
    """
    data = [name for name in names if name.endswith(FORMATS) and not any(p[0] == "." for p in name.split("/"))]
    chosen = _subset_of(_configs(card, where), subset, where)
    splits = {name: files for name, files in _splits(chosen, data).items() if files}
    wanted = split or DEFAULT_SPLIT
    if wanted not in splits:
        there = ", ".join(sorted(splits)) or f"none, with files of {', '.join(FORMATS)}"
        raise DataError(f"{where}: no split {wanted!r}; there are: {there}")
    return sorted(splits[wanted])


def read_dataset_files(directory: Path, subset: str | None, split: str | None) -> Any:
    """The rows of a subset and split of a clone of a data set, in memory: mappings. Raises DataError."""
    import pyarrow

    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    chosen = choose_files(names, directory / CARD, subset, split, str(directory))
    formats = {PurePosixPath(name).suffix for name in chosen}
    if len(formats) > 1:
        raise DataError(f"{directory}: split {split or DEFAULT_SPLIT!r} mixes formats: {', '.join(sorted(formats))}")
    try:
        return _read_rows([directory / name for name in chosen], formats.pop())
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{directory}: {', '.join(chosen)} cannot be read: {error}") from error


def _read_rows(paths: Sequence[Path], suffix: str) -> Any:
    import datasets
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    if suffix in (".json", ".jsonl"):
        return [record for path in paths for record in _json_records(path)]
    read = pyarrow.parquet.read_table if suffix == ".parquet" else pyarrow.csv.read_csv
    return datasets.Dataset(pyarrow.concat_tables([read(path) for path in paths]))


def _json_records(path: Path) -> list[Any]:
    """The objects of a file with one a line, or with one list of them."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.split("\n") if line.strip()]


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


def _splits(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """The files of every split of a subset: by the patterns of its description, else by words in the names of files."""
    patterns, folder = config.get("data_files"), str(config.get("data_dir") or "").strip("/")
    if patterns is None:
        inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
        by_word = {split: [n for n in inside if _has_word(n, words)] for split, words in _SPLIT_WORDS.items()}
        return by_word if any(by_word.values()) else {DEFAULT_SPLIT: inside}
    found: dict[str, list[str]] = {}
    for entry in [patterns] if isinstance(patterns, str) else patterns:
        split, globs = (DEFAULT_SPLIT, entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        # In fsspec's patterns `**/` may stand for no folder.
        wanted = [str(glob).replace("**/", "*") for glob in ([globs] if isinstance(globs, str) else globs)]
        files = [name for name in names if any(fnmatchcase(name, glob) for glob in wanted)]
        found[split] = [*found.get(split, []), *files]
    return found


def _has_word(name: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"(?<![a-z]){word}(?![a-z])", name.lower()) for word in words)

"""What relative paths of a configuration count from: those in a YAML file from that file's directory, as its `defaults`
do; those on the command line from the working directory.

`read_config_file` marks the first with their file (`InFile`); `resolve_paths` makes texts of them when it is known
which ones other files and the command line have replaced.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megatron_tlt.config.base import FilePath, OnDisk
from megatron_tlt.config.schema import element_of, section_of
from megatron_tlt.errors import ConfigProblem

PACKED = (".gz", ".bz2", ".xz", ".zst")
KINDS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
FORMATS = (*KINDS, *(f"{ending}{packed}" for ending in KINDS if ending != ".parquet" for packed in PACKED))
"""Endings of the names of data files that can be read."""
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?")


def has_form_of_name(text: str) -> bool:
    """Whether a text could be a name on the Hugging Face hub: OWNER/NAME or OWNER/NAME@REVISION, and no data file."""
    match = _NAME.fullmatch(text)
    return match is not None and not match[1].endswith(FORMATS)


@dataclass(frozen=True)
class InFile:
    """A relative path as a YAML file has it; `may_be_name`: or a name on the hub."""

    text: str
    file: Path
    may_be_name: bool

    @property
    def path(self) -> str:
        """The path from the working directory; a name on the hub as it is."""
        joined = os.path.join(self.file.parent, self.text)
        if self.may_be_name and has_form_of_name(self.text) and not os.path.lexists(joined):
            return self.text
        plain = os.path.normpath(joined)
        if os.path.realpath(plain) != os.path.realpath(joined):  # a link before ".."
            return joined
        is_like_name = self.may_be_name and has_form_of_name(plain) and not os.path.lexists(plain)
        return os.path.join(".", plain) if is_like_name else plain


def mark_paths(values: dict[str, Any], section: type[BaseModel], file: Path) -> dict[str, Any]:
    """`values` of a section with `InFile` in place of its relative paths. New dict."""
    found = {}
    for key, value in values.items():
        field = section.model_fields.get(key)
        mark = next((m for m in field.metadata if isinstance(m, FilePath)), None) if field is not None else None
        found[key] = value if field is None else _marked(value, field.annotation, mark, file)
    return found


def _marked(value: Any, annotation: Any, mark: FilePath | None, file: Path) -> Any:
    if isinstance(value, dict) and (section := section_of(annotation)) is not None:
        return mark_paths(value, section, file)
    if isinstance(value, list) and (element := element_of(annotation)) is not None:
        return [_marked(item, element, None, file) for item in value]
    if mark is None or not isinstance(value, str) or not value or value.startswith(("/", "~")):
        return value
    on_disk = mark if isinstance(mark, OnDisk) else OnDisk()
    of_module = ":" in value and not value.rpartition(":")[0].endswith(".py")  # package.module:name
    if value in on_disk.words or of_module:
        return value
    return InFile(value, file, on_disk.content is not None)


def resolve_paths(node: Any, problems: list[ConfigProblem], notes: list[str], field: str = "") -> Any:
    """A tree with paths from the working directory in place of `InFile`. New tree.

    Many programs count such a path from the working directory: appends to `problems` where only that one exists, and
    to `notes` where both do.
    """
    if isinstance(node, dict):
        return {k: resolve_paths(v, problems, notes, f"{field}.{k}" if field else str(k)) for k, v in node.items()}
    if isinstance(node, list):
        return [resolve_paths(v, problems, notes, f"{field}.{i}") for i, v in enumerate(node)]
    if not isinstance(node, InFile):
        return node
    new, old = (text.rpartition(":")[0] or text for text in (node.path, node.text))
    if new == old and node.may_be_name:  # taken for a name on the hub
        new = os.path.normpath(os.path.join(node.file.parent, old))
    if os.path.exists(old) and not (os.path.exists(new) and os.path.samefile(new, old)):
        if os.path.exists(new):
            notes.append(f"{field} = {node.path}: a path in {node.file} counts from that file; {old} is not it")
        else:
            advice = f"write {os.path.relpath(old, node.file.parent)} there, or an absolute path"
            allowed = f"counts from {node.file}, so it is {new}, which does not exist; {old} does: {advice}"
            problems.append(ConfigProblem(field, node.text, allowed))
    return node.path

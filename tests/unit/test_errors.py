"""What messages say of files that are not there."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from megatron_tlt.errors import no_such_file


def test_what_is_in_the_place_of_a_file_or_a_directory_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").touch()
    assert no_such_file(tmp_path) == "is a directory, no file"
    assert no_such_file(file) == "is no directory"
    assert no_such_file(tmp_path / "row.jsonl") == "no such file or directory; did you mean rows.jsonl?"
    assert no_such_file(tmp_path / "no" / "rows.jsonl") == "no such file or directory"


def test_the_names_beside_may_be_many_or_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: str) -> NoReturn:
        raise PermissionError(13, "Permission denied", folder)

    def endless(folder: str) -> Any:
        return nullcontext(SimpleNamespace(name=f"row-{number}") for number in count())

    for scandir, said in ((refused, ""), (endless, "; did you mean row-7?")):
        monkeypatch.setattr(os, "scandir", scandir)
        assert no_such_file("/data/rows-7") == f"no such file or directory{said}"

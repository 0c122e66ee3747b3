"""The table of tests/cases/README.md: every file of tests has rows, and every test that a row names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests/cases"
HEADING = re.compile(r"## .*: `(test_\w+\.py)`")
COLUMNS = ["kind", "reported at", "command or call", "right value", "test"]


def rows() -> list[tuple[str, list[str]]]:
    """(the file of the section, cells) of every row of the tables, headings included."""
    found, file = [], ""
    for line in (CASES / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := HEADING.fullmatch(line):
            file = heading[1]
        if line.startswith("|") and not line.startswith("|--"):
            found.append((file, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return found


def functions_of(file: Path) -> set[str]:
    return {n.name for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


def test_every_file_of_cases_has_a_table_with_rows():
    files = [file for file, cells in rows() if cells == COLUMNS]
    assert files == list(dict.fromkeys(files))
    assert {file for file, cells in rows() if cells != COLUMNS} == {file.name for file in CASES.glob("test_*.py")}


def test_every_test_that_a_row_names_exists():
    absent = []
    for file, cells in rows():
        assert len(cells) == len(COLUMNS), cells
        names = re.findall(r"`([^`]+)`", cells[-1])
        assert names or cells == COLUMNS, cells
        for name in names:
            place, _, test = name.rpartition("::")
            if test not in functions_of(ROOT / place if place else CASES / file):
                absent.append(name)
    assert absent == []

"""docs/reference/metrics.md has the columns that the package names, and no others. Whole runs: tests/integration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers.columns import documented, undocumented
from tests.helpers.mpi import ROOT

SECTIONS = {name.partition("/")[0] for name in documented() if "/" in name}
# Of windows; they leave the row again (`trainer/metrics._stop_time`).
INNER = {"idle/entered_max", "idle/left_max"}


def texts() -> Iterator[str]:
    """Every string in the package, pieces of f-strings too."""
    for path in (ROOT / "megatron_tlt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_columns_in_the_code_are_on_the_page():
    column = re.compile(rf"(?:{'|'.join(SECTIONS)})/[a-z][a-z0-9_/@]*")
    named = {text for text in texts() if column.fullmatch(text) and not text.endswith(("_", "/", "@"))}
    assert len(named) > 40
    assert undocumented(named - INNER - {"idle/rank"}) == []


def test_columns_on_the_page_are_in_the_code():
    words = {word for text in texts() for word in re.split(r"\W+", text)} | {"turn_N", "rankNNN", "PHASE_peak_mib"}
    words |= {"pass", "K"}
    parts = {name: re.split(r"\W+", name.removeprefix("engine/spec_").removesuffix("_mean")) for name in documented()}
    names = {word for path in (ROOT / "megatron_tlt").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    assert [name for name, found in parts.items() if not set(found) <= words | names] == []

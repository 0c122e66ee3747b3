"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from megatron_tlt.observe.files import write_atomically


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path):
    file = tmp_path / "out.jsonl"
    file.write_text("old")

    def lines():
        yield "new"
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        write_atomically(file, lines())
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
    assert file.read_text() == "old"

"""Files that appear whole or not at all."""

import os
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


def test_a_link_stays_and_a_pipe_is_written_into(tmp_path: Path):
    """Before, `--out /dev/stdout` of root replaced /dev/stdout of the machine by a file."""
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", ["a"])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "a\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", ["a", "b"])
    assert os.read(reader, 10) == b"a\nb\n" and (tmp_path / "pipe").is_fifo()
    os.close(reader)

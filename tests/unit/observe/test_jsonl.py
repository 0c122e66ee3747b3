"""Files of rows by step, which may have many GB."""

import tracemalloc
from contextlib import closing

from megatron_tlt.observe.jsonl import StepFile, read_rows, rows_from_end


def test_a_resumed_run_reads_and_writes_no_row_that_it_keeps(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    kept = "".join(f'{{"step": {step}, "ids": [{"1, " * 300}1.50]}}\n' for step in range(1, 301))
    path.write_text(kept + '{"step":301,"ids":[1]}\n{"step":300,"i\n\n{"step":302,"ids":[1]}\n{"st')
    inode = path.stat().st_ino
    tracemalloc.start()
    with closing(StepFile(path, 300)) as file:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert path.read_text() == kept and path.stat().st_ino == inode and peak < 100_000
        file.write_rows(301, {"ids": []})
    assert path.read_text() == kept + '{"step":301,"ids":[]}\n'


def test_a_whole_row_without_its_line_end_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step":1}\n{"step":2}')
    StepFile(path, 2).close()
    assert path.read_text() == '{"step":1}\n{"step":2}\n'


def test_rows_from_the_end_are_those_from_the_begin(tmp_path):
    path = tmp_path / "rows.jsonl"
    for text in ("", "\n", "1", '{"a":1}', '\n{"a":1}\n\n{"b\n{"b":2}\n[3]\n\0\n{"c":3}'):
        path.write_text(text)
        found = [*rows_from_end(path)]
        assert [row for _, row in found][::-1] == [*read_rows(path)]
        assert all(text.encode()[:end].rstrip().endswith(b"}") for end, _ in found)

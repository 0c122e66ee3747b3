"""Notes for the batch script."""

from megatron_tlt.observe.attempt import VARIABLE, note_checkpoint, note_exit, note_start


def test_each_note_is_a_file_that_holds_the_last_number(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    note_start(3)
    note_checkpoint(4)
    note_checkpoint(6)
    note_exit(75)
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {
        "start": "3\n",
        "checkpoint": "6\n",
        "exit": "75\n",
    }

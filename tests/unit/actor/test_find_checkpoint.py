"""Which checkpoint a start takes, and what it says of those that it does not."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.actor import checkpoint
from megatron_tlt.errors import CheckpointError

WORLD = SimpleNamespace(is_main=True, broadcast_object=lambda value: value)


def test_what_is_refused_says_whether_there_is_one_before_it(monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "_candidates", lambda _: [Path("step-2"), Path("step-1")])
    monkeypatch.setattr(checkpoint, "_problem", lambda _, path: f"{path} is damaged")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CheckpointError, match=r"; checkpoint\.resume=never starts anew"),
    ):
        checkpoint.find_checkpoint(WORLD, Path("run"), "auto")
    assert [record.getMessage() for record in caplog.records] == [
        "REFUSED: step-2 is damaged. Falling back to the checkpoint before it.",
        "REFUSED: step-1 is damaged. There is none before it.",
    ]

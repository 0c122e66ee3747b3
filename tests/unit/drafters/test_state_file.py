from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_tlt.drafters.state_file import drafter_state_writer, load_drafter_state
from megatron_tlt.errors import CheckpointError
from tests.helpers.tiny_drafters import everything, online_trainer

STATE = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64)},
    "half": torch.randn(5).bfloat16(),
    "selector": {"arms": [1, 2.5, None], "name": "beg", "deep": {"on": True}, "empty": {}},
}


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def test_what_is_saved_is_loaded(tmp_path) -> None:
    drafter_state_writer(STATE)(tmp_path / "drafter.safetensors")
    assert same(load_drafter_state(tmp_path / "drafter.safetensors"), STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter.safetensors"]
    assert set(load_file(tmp_path / "drafter.safetensors")) == {"model/a", "model/b", "half"}


def test_a_trainers_state_is_of_the_moment_of_the_save_and_holds_only_what_is_trained(tmp_path) -> None:
    one, two = online_trainer(), online_trainer(lengths=())
    for _ in range(3):
        one.train_step()
    one.merge()
    write = drafter_state_writer({"drafter": one.state_dict(), "selector": {"rates": [0.5]}})
    saved = everything(one)
    one.train_step()  # while the thread writes
    write(tmp_path / "d")
    two.load_state_dict(load_drafter_state(tmp_path / "d")["drafter"])
    assert torch.equal(saved, everything(two))
    assert (two.version, two.trained_steps) == (1, 3)
    with safe_open(str(tmp_path / "d"), "pt") as file:
        assert len(file.keys()) == 4 * len(one.weights())


def test_another_file_is_refused(tmp_path) -> None:
    save_file({"a": torch.zeros(2)}, str(tmp_path / "d"))
    with pytest.raises(CheckpointError, match="d is no drafter state"):
        load_drafter_state(tmp_path / "d")

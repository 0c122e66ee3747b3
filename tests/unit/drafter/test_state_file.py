from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_tlt.drafter.state_file import StateSnapshot, load_state
from megatron_tlt.errors import CheckpointError
from tests.helpers.online import everything, online_trainer

STATE = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64)},
    "half": torch.randn(5).bfloat16(),
    "selector": {"arms": [1, 2.5, None], "name": "beg", "deep": {"on": True}, "empty": {}},
}


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def save(file, state=STATE) -> None:
    StateSnapshot().take(state)(file)


def test_what_is_saved_is_loaded(tmp_path) -> None:
    save(tmp_path / "drafter.safetensors")
    assert same(load_state(tmp_path / "drafter.safetensors"), STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter.safetensors"]
    assert set(load_file(tmp_path / "drafter.safetensors")) == {"model/a", "model/b", "half"}


def test_a_trainers_state_survives_and_holds_only_what_is_trained(tmp_path) -> None:
    one, two = online_trainer(), online_trainer(lengths=())
    for _ in range(3):
        one.train_step()
    one.merge(lambda _: None)
    save(tmp_path / "d", {"drafter": one.state_dict(), "selector": {"rates": [0.5]}})
    two.load_state_dict(load_state(tmp_path / "d")["drafter"])
    assert torch.equal(everything(one), everything(two))
    assert (two.version, two.trained_steps, two.trained_tokens) == (1, 3, one.trained_tokens)
    with safe_open(str(tmp_path / "d"), "pt") as file:
        assert len(file.keys()) == 4 * len(one.weights())


def test_the_snapshot_is_of_the_moment_of_the_call(tmp_path) -> None:
    weight, snapshot = torch.zeros(4), StateSnapshot()
    for number in (0, 1):
        write = snapshot.take({"w": weight, "n": number})
        weight += 1
        write(tmp_path / "file")
        assert load_state(tmp_path / "file")["w"].tolist() == [number] * 4
        assert load_state(tmp_path / "file")["n"] == number


@pytest.mark.parametrize("part", ["tensor", "json", "name"])
def test_altered_files_are_refused(tmp_path, part: str) -> None:
    file = tmp_path / "d"
    save(file)
    with safe_open(str(file), "pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    if part == "tensor":
        tensors["half"][0] += 1
    elif part == "json":
        metadata["about"] = metadata["about"].replace("2.5", "2.6")
    else:
        tensors["other"] = tensors.pop("half")
    save_file(tensors, str(file), metadata=metadata)
    with pytest.raises(CheckpointError, match="d was altered"):
        load_state(file)

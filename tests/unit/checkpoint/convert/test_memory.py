"""Peak memory of a conversion: counted by watching every tensor that is made from a file, or written to one."""

from __future__ import annotations

import weakref
from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_tlt.checkpoint.convert import to_megatron
from megatron_tlt.checkpoint.export import write_run
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.hf_writer import save_hf
from tests.helpers.tiny_models import random_weights


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that torch operators have made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.peak = self.made = 0
        self._live: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor)
        return out

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None or known() is None:
            self._live[storage._cdata] = weakref.ref(storage)
            self.made += storage.nbytes()
        alive = [held for held in (ref() for ref in self._live.values()) if held is not None]
        self.peak = max(self.peak, sum(held.nbytes() for held in alive))
        self._live = {held._cdata: self._live[held._cdata] for held in alive}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, config) of a model whose layers outweigh its largest parameter many times."""
    config = ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=256,
    )
    directory = tmp_path_factory.mktemp("memory") / "hf"
    save_hf(directory, config, random_weights(config))
    return directory, config


@pytest.mark.parametrize(("tp", "pp", "dtype"), [(1, 1, None), (2, 2, None), (2, 4, "bf16")])
def test_one_parameter_at_a_time(model, tmp_path, monkeypatch, tp, pp, dtype):
    hf, config = model
    shapes = config.parameter_shapes()
    largest = max(prod(shape) for shape in shapes.values()) * 4
    total = config.num_parameters * 4
    assert total > 15 * largest
    # What safetensors and torch.load make does not pass the dispatcher: watch it where it enters.
    live = LiveBytes()
    true = to_megatron.HfDir.read

    def read(self, name):
        tensor = true(self, name)
        live.watch(tensor)
        return tensor

    monkeypatch.setattr(to_megatron.HfDir, "read", read)
    todo = to_megatron.plan(hf, tp, pp, dtype)
    with live:
        to_megatron.write(todo, tmp_path / "mg", SingleProcess())
    assert live.made >= total  # the meter saw the whole model go by
    parameter = 2 * largest  # gate and up together are one of Megatron's
    assert live.peak <= parameter + 1.5 * parameter / tp + 4096  # itself, a shard of it, and what is written
    loaded, load = LiveBytes(), torch.load

    def watched(*arguments, **options):
        tensor = load(*arguments, **options)
        loaded.watch(tensor)
        return tensor

    monkeypatch.setattr(torch, "load", watched)
    with loaded:
        write_run(tmp_path / "mg/release", SingleProcess(), ModelSection(path=str(hf)), tmp_path / "back", "fp32")
    assert loaded.made >= total
    assert loaded.peak <= 2 * parameter + 4096

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.load import build_config
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer import device_memory
from megatron_tlt.trainer.device_memory import with_device_memory


def world(device, others=()):
    return SimpleNamespace(
        device=torch.device(device), local_size=4, all_gather_object=lambda mine: [mine, *others]
    )


def config(*overrides):
    return build_config({"model": {"path": "m"}}, overrides)


def test_limits_are_those_of_the_smallest_gpu_and_node_unless_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(device_memory, "total_memory", lambda: 2000 * GIB)
    there = world("cuda", [(79.5, 1900.0, 8)])
    found = with_device_memory(config(), there).cluster
    assert (found.memory_gib, found.host_memory_gib, found.ranks_per_node) == (79.5, 1900.0, 8)
    set_by_hand = with_device_memory(config("cluster.memory_gib=60", "cluster.host_memory_gib=100"), there).cluster
    assert (set_by_hand.memory_gib, set_by_hand.host_memory_gib) == (60, 100)
    with pytest.raises(ConfigError, match=r"cluster\.memory_gib.*must be <= 79\.50: a GPU"):
        with_device_memory(config("cluster.memory_gib=79.6"), there)
    with pytest.raises(ConfigError, match=r"cluster\.host_memory_gib.*must be <= 1900\.00: a node"):
        with_device_memory(config("cluster.host_memory_gib=1901"), there)
    assert with_device_memory(config(), world("cpu")).cluster.memory_gib is None

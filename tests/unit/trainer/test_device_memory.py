from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.load import build_config
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer.device_memory import with_device_memory


def world(device, others=()):
    return SimpleNamespace(device=torch.device(device), all_gather_object=lambda mine: [mine, *others])


def config(*overrides):
    return build_config({"model": {"path": "m"}}, overrides)


def test_the_limit_is_the_smallest_gpu_unless_one_is_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    assert with_device_memory(config(), world("cuda", [79.5])).cluster.memory_gib == 79.5
    set_by_hand = config("cluster.memory_gib=60")
    assert with_device_memory(set_by_hand, world("cuda", [79.5])) is set_by_hand
    with pytest.raises(ConfigError, match=r"cluster\.memory_gib.*must be <= 79\.50"):
        with_device_memory(config("cluster.memory_gib=79.6"), world("cuda", [79.5]))
    assert with_device_memory(config(), world("cpu")).cluster.memory_gib is None

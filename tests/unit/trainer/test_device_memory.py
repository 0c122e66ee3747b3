from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.planning.memory import KV, PHASES, RESERVE, beside_cache, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer import device_memory
from megatron_tlt.trainer.device_memory import (
    cache_bytes,
    handle_problems,
    let_segments_grow,
    open_communicators,
    with_device_memory,
)


def world(device, others=()):
    return SimpleNamespace(device=torch.device(device), local_size=4, all_gather_object=lambda mine: [mine, *others])


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


@pytest.fixture
def gpu(monkeypatch):
    """A recipe, its plan, and a GPU whose free and allocated memory can be set."""
    recipe = load_config("configs/recipes/grpo-qwen2.5-7b-1n8g.yaml")
    shape = recipe.model.architecture
    stages, state = estimate_memory(recipe, shape, 8, "cuda"), SimpleNamespace(outside=GIB, allocated=30 * GIB)
    total = 79 * GIB
    monkeypatch.setattr(device_memory.ModelConfig, "from_hf", lambda path: SimpleNamespace(architecture=shape))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.allocated)
    free = lambda device: (total - state.outside - state.allocated, total)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    return recipe, stages, state


def there(others=()):
    return SimpleNamespace(**vars(world("cuda", others)), size=8, rank=0, is_main=True)


def test_the_cache_is_what_the_fullest_gpu_has_left_of_the_plan(gpu, monkeypatch):
    (recipe, stages, state), warned = gpu, []
    monkeypatch.setattr(device_memory._log, "warning", lambda text, *values: warned.append(text % values))
    planned, reserve = stages[0].parts[KV], stages[0].parts[RESERVE]
    assert reserve == 2 * GIB and max(map(stages[0].of_phase, PHASES)) == pytest.approx(79 * GIB, abs=2)
    assert cache_bytes(recipe, there()) == planned  # less is taken than was reserved: the plan
    assert cache_bytes(recipe, world("cpu")) is None and not warned
    state.outside = 5 * GIB
    later = GIB // 2  # modules and connections that open after the measurement
    assert cache_bytes(recipe, there()) == pytest.approx(planned - 3 * GIB - later, abs=2)
    left = planned - 4 * GIB
    assert cache_bytes(recipe, there([(left, 6 * GIB, 7 * GIB)])) == left  # another rank's, on all
    assert "rank 1 has" in warned[-1] and "6.00 GiB of its GPU" in warned[-1] and len(warned) == 2
    state.outside, state.allocated = GIB, beside_cache(recipe, stages) + GIB
    assert cache_bytes(recipe, there()) == pytest.approx(planned - GIB, abs=2)


def test_less_than_one_requests_cache_is_refused(gpu):
    recipe, stages, state = gpu
    state.outside = 2 * GIB - GIB // 2 + stages[0].parts[KV] - GIB // 10
    with pytest.raises(ConfigError, match=r"cluster\.memory_gib.*one request of full length.*rank 0 has 0\.10 GiB"):
        cache_bytes(recipe, there())


def test_every_group_sends_before_the_cache_is_sized(monkeypatch):
    sent = []
    monkeypatch.setattr(device_memory.dist, "all_reduce", lambda tensor, group: sent.append((group, tensor.nbytes)))
    engine = SimpleNamespace(all_reduce=lambda tensor: sent.append(("engine", tensor.nbytes)))
    open_communicators(["world", "tp"], engine, torch.device("cpu"))
    names, small, large = ["world", "tp", "engine"], sent[:3], sent[3:]
    assert [name for name, _ in small] == [name for name, _ in large] == names
    assert {size for _, size in small} == {4} and {size for _, size in large} == {8 << 20}


def test_segments_grow_unless_the_environment_or_handles_to_them_forbid_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    cuda = torch.device("cuda")
    let_segments_grow(torch.device("cpu"))
    let_segments_grow(cuda, by_handles=True)
    assert asked == []
    let_segments_grow(cuda)
    assert asked == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    let_segments_grow(cuda)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("backend", "transport", "settings", "device", "is_refused"),
    [
        ("vllm", "auto", "expandable_segments:True", "cuda", True),
        ("vllm", "cuda_ipc", "max_split_size_mb:9, expandable_segments: True", "cuda", True),
        ("vllm", "shared_memory", "expandable_segments:True", "cuda", False),
        ("vllm", "auto", "expandable_segments:False", "cuda", False),
        ("vllm", "auto", "expandable_segments:True", "cpu", False),
        ("embedded", "auto", "expandable_segments:True", "cuda", False),
    ],
)
def test_handles_of_expandable_segments_are_refused_at_the_start(
    backend, transport, settings, device, is_refused, monkeypatch
):
    """And not at the first weight sync."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    given = config(f"rollout.backend={backend}", f"sync.transport={transport}")
    found = handle_problems(given, torch.device(device))
    assert [(p.path, p.value) for p in found] == ([("sync.transport", transport)] if is_refused else [])

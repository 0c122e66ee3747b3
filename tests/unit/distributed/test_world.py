import os
import socket

import pytest
import torch

from megatron_tlt.distributed.world import _choose_device, _reachable_address
from megatron_tlt.errors import DistributedError


def test_a_host_name_that_resolves_is_taken(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"a": "10.0.0.7"}[name])
    assert _reachable_address(["a", "a", "b"]) == "10.0.0.7"


def test_a_loopback_address_is_replaced_by_the_one_that_leads_to_another_host(monkeypatch):
    asked = []

    class Probe(socket.socket):
        def connect(self, address):
            asked.append(address[0])

        def getsockname(self):
            return ("10.0.0.7", 40000)

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "socket", Probe)
    assert _reachable_address(["a", "a", "b"]) == "10.0.0.7"
    assert asked == ["b"]


@pytest.mark.parametrize("already", [None, "8"])
def test_a_gpus_context_is_made_with_one_hardware_queue(monkeypatch: pytest.MonkeyPatch, already: str | None):
    """With any launcher. CUDA reads the variable when the context is made; a user's own value stays."""
    name, found = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, already or "")
    if already is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append((index, os.environ.get(name))))
    assert _choose_device("auto", 9) == torch.device("cuda", 1)
    assert found == [(1, already or "1")]


def test_auto_does_not_fall_to_the_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A driver that is too old for this torch: the job would run for days on CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megatron_tlt.distributed.world._DEVICE_FILES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert _choose_device("auto", 0).type == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(DistributedError, match="580"):
        _choose_device("auto", 0)
    assert _choose_device("cpu", 0).type == "cpu"

import fcntl
import logging
import socket
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.config.run import DistributedSection
from megatron_tlt.distributed import world
from megatron_tlt.distributed.world import World, _reachable_address
from megatron_tlt.errors import DistributedError


@pytest.fixture(autouse=True)
def no_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


class Board:
    """A store's values; counts the requests."""

    def __init__(self, values):
        self.values, self.requests = values, 0

    def get(self, key):
        self.requests += 1
        return self.values[key].encode()

    def check(self, keys):
        self.requests += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self.requests += 1
        return [self.values[key].encode() for key in keys]


def test_a_rank_reads_the_board_of_a_large_world_in_few_requests(caplog):
    """Rank 0 serves them in one thread, and after a timeout every rank asks at once."""
    phases = {f"phase/{rank}": f"{rank % 2}|3|rollout" for rank in range(1000)}
    store = Board(phases | {f"waits/{rank}": f"{4 + (rank != 7)}" for rank in range(1000)})
    world = World(0, 1000, 0, 8, torch.device("cpu"), 1.0, store, None)
    world._phase.order = 1
    behind = world.ranks_behind()
    assert behind == dict.fromkeys(range(0, 1000, 2), "phase rollout, step 3")
    assert store.requests <= 3
    with caplog.at_level(logging.WARNING):
        world._name_missing(5, 60.0)
    assert "waited 60 s for rank 7 in phase" in caplog.text and store.requests <= 4


@pytest.mark.parametrize(("named", "address"), [("ib0,eth1", "10.1.0.7"), ("eth9", "10.0.0.7"), ("lo", "10.0.0.7")])
def test_the_address_of_the_named_interface_comes_before_the_host_name(monkeypatch, named, address):
    """IFACE under Slurm: a host name may resolve to a network that the other hosts do not reach."""

    def address_of(probe, request, name):
        found = {b"ib0": "10.1.0.7", b"lo": "127.0.0.1"}.get(name.rstrip(b"\0"))
        if found is None:
            raise OSError(19, "No such device")
        return bytes(20) + socket.inet_aton(found) + bytes(8)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    monkeypatch.setattr(fcntl, "ioctl", address_of)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert _reachable_address(["a", "a", "b"]) == address


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


def test_a_start_by_another_launcher_is_refused_before_mpi_starts(monkeypatch):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(world, "start_mpi", lambda: pytest.fail("starts MPI"))
    with pytest.raises(DistributedError, match="WORLD_SIZE = 8"):
        World.start(DistributedSection(device="cpu"))


@pytest.mark.parametrize(("other", "is_named"), [("b", True), ("a", False)])
def test_hosts_that_do_not_connect_are_told_how_to_name_the_network(monkeypatch, other, is_named):
    def fail(*_):
        raise RuntimeError("Connect timeout")

    comm = SimpleNamespace(rank=0, size=2, allgather=lambda mine: ["a", other] if isinstance(mine, str) else [None] * 2)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(world, "start_mpi", lambda: comm)
    monkeypatch.setattr(world, "keep_freed_pages", lambda: None)
    monkeypatch.setattr(world, "_join", fail)
    with pytest.raises(DistributedError) as caught:
        World.start(DistributedSection(device="cpu"))
    assert "Connect timeout" in str(caught.value)
    assert ("set GLOO_SOCKET_IFNAME (slurm/: IFACE)" in str(caught.value)) == is_named

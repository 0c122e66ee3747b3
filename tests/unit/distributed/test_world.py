import socket

from megatron_tlt.distributed.world import _reachable_address


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

"""A stand-in for the Hugging Face hub on the loopback interface: the part of its protocol that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.helpers.mpi import ROOT


@dataclass
class Repository:
    """Files by path, at one commit. `gated`: files need `token`, facts do not."""

    files: dict[str, bytes]
    commit: str = ""
    gated: bool = False
    token: str | None = None

    def __post_init__(self) -> None:
        if not self.commit:
            names = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()})
            self.commit = hashlib.sha1(names.encode()).hexdigest()


@dataclass
class Hub:
    """Repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME"; `asked`: what clients sent, as "METHOD path".

    `silent`: requests whose path has this text are accepted and never answered; None: none.
    """

    repositories: dict[str, Repository]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    silent: str | None = None
    over: Event = field(default_factory=Event)

    def fetched(self, name: str) -> list[str]:
        """Requests for the content of files whose path ends with `name`."""
        return [line for line in self.asked if line.startswith("GET ") and "/resolve/" in line and line.endswith(name)]


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """The hub at `url` until the block ends."""
    hub = Hub(repositories)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def _respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(f"{self.command} {path}")
        if self.served.silent is not None and self.served.silent in path:
            self.served.over.wait()
            return
        if match := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._about(match[1], match[2], match[3] or "main")
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(f"{'datasets' if match[1] else 'models'}/{match[2]}", match[3], match[4])
        else:
            self._send(404, b"")

    def _repository(self, key: str, revision: str) -> Repository | None:
        found = self.served.repositories.get(key)
        if found is None:
            self._send(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", found.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return found
        return None

    def _about(self, key: str, what: str | None, revision: str) -> None:
        if (repository := self._repository(key, revision)) is None:
            return
        if what == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repository.files.items()
            ]
            self._send_json(entries)
            return
        siblings = [{"rfilename": name} for name in repository.files]
        self._send_json({"id": key.partition("/")[2], "sha": repository.commit, "siblings": siblings})

    def _file(self, key: str, revision: str, name: str) -> None:
        if (repository := self._repository(key, revision)) is None:
            return
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name not in repository.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
        else:
            data = repository.files[name]
            tag = f'"{hashlib.sha1(data).hexdigest()}"'
            self._send(200, data, {"ETag": tag, "X-Repo-Commit": repository.commit})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


POLICY = {path.name: path.read_bytes() for path in (ROOT / "assets/demo-policy").iterdir() if path.suffix != ".md"}
UNUSED = {"README.md": b"1", "pytorch_model.bin": b"1", "original/a.json": b"{}", "consolidated.safetensors": b"2"}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files: socratic/*
---
"""
ROWS = {
    "README.md": CARD,
    "main/train-0.jsonl": b'{"prompt": "1 + 1", "answer": "2"}\n',
    "main/test-0.jsonl": b'{"prompt": "1 + 2", "answer": "3"}\n',
    "socratic/0.jsonl": b'{"prompt": "?", "answer": "!"}\n',
}


def pretend(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE do before huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)

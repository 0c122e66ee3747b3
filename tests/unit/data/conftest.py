"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hub_server import POLICY, ROWS, UNUSED, Hub, Repository, pretend, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = {
        "models/a/policy": Repository(POLICY | UNUSED),
        "models/a/gated": Repository(POLICY, gated=True, token="secret"),
        "datasets/a/rows": Repository(ROWS),
    }
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(repositories) as hub:
        pretend(monkeypatch, hub.url, tmp_path / "cache")
        yield hub

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.trtllm_engines import scratch_directory


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A short place for sockets and logs: the log of an engine that failed stays."""
    tmp_path_factory.getbasetemp()  # pytest's own directories lie elsewhere
    with scratch_directory():
        yield

"""One thread for every test, as the suite may run in parallel; markers by folder; the reasons of skipped tests."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels run in triton's interpreter where torch sees no GPU (asked without torch, whose import takes seconds). Triton
# reads this where a kernel is defined.
_is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or version("torch").endswith("+cpu")
if _is_hidden or not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test may look anything up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def package_logger() -> Iterator[logging.Logger]:
    """The package's logger, for a test that prepares it for a rank; then as before, for caplog."""
    logger = logging.getLogger("megatron_tlt")
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/mpi starts ranks, so it carries the marker `mpi`; tests/gpu needs a GPU. Files with slow
    tests come first: with two workers none of them is left for the end.
    """
    here = Path(__file__).parent
    for item in items:
        top = item.path.relative_to(here).parts[0]
        if top in ("mpi", "gpu"):
            item.add_marker(top)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests for a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipping once, with what to install, among the last lines."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"SKIPPED {count} tests: {reason}", yellow=True)

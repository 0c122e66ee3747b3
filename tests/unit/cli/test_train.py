import os
from types import SimpleNamespace

import pytest

from megatron_tlt.cli import train
from megatron_tlt.cli.main import main
from tests.helpers.mpi import ROOT

NAMES = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"


@pytest.mark.parametrize(
    ("setting", "given", "wanted"),
    [
        ("watchdog.hang_s=1800", {}, ["0", "0"]),
        ("watchdog.hang_s=1800", {NAMES[0]: "1"}, ["1", "0"]),
        ("watchdog.hang_s=0", {}, [None, None]),
    ],
)
def test_pytorch_ends_no_rank_that_waits_in_nccl_where_a_watchdog_runs(
    monkeypatch: pytest.MonkeyPatch, setting: str, given: dict[str, str], wanted: list[str | None]
) -> None:
    """Its SIGABRT of the waiting ranks comes before the watchdog finds the one that hangs."""
    monkeypatch.setattr(os, "environ", {**{n: v for n, v in os.environ.items() if n not in NAMES}, **given})
    monkeypatch.setattr(train, "StopSignals", lambda: SimpleNamespace(install=lambda: None))
    found: list[list[str | None]] = []
    monkeypatch.setattr(train, "run_on_every_rank", lambda *_: found.append([*map(os.environ.get, NAMES)]) or 0)
    assert main(["train", str(ROOT / "configs/quickstart.yaml"), setting]) == 0
    assert found == [wanted]

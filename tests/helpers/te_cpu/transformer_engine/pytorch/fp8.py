"""FP8, which is off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)


def fp8_autocast(enabled: bool, **_: Any) -> AbstractContextManager[None]:
    """Does nothing."""
    assert not enabled
    return nullcontext()

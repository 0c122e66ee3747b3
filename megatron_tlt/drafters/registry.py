"""All kinds of trained drafters by name: `KIND` of the folders of those names beside this file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.drafters.base import DrafterKind

KINDS: dict[str, DrafterKind[Any, Any]] = {
    name: import_module(f"megatron_tlt.drafters.{name}.kind").KIND for name in DRAFTERS
}

"""Layouts by ranks. Imports nothing: tests read it, too."""

from __future__ import annotations

from typing import Any

_SP = {"tp": 2, "sequence_parallel": True}
HIDDEN: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2}, {**_SP, "recompute": "full"}, {"pp": 2}, {"cp": 2}, {}],
    4: [{**_SP, "pp": 2}, {**_SP, "cp": 2}],
}
FORWARDS = ("update", "old log-probs", "scoring")

"""Cases by ranks. Imports neither torch nor megatron: tests read it, too."""

from __future__ import annotations

from typing import Any, get_args

from megatron_tlt.config.algorithm import AlgorithmName

_SP = {"tp": 2, "sequence_parallel": True}
FORWARDS = ("update", "old log-probs", "scoring")
# Which forward hands the states out, and how ranks that share an answer gather them, are independent.
HIDDEN: dict[int, list[tuple[dict[str, Any], str]]] = {
    1: [(layout, forward) for layout in ({}, {"recompute": "full"}) for forward in FORWARDS],
    2: [
        *((layout, forward) for layout in ({"pp": 2}, {}) for forward in FORWARDS),
        *(({**_SP, "recompute": "full"}, "update"), ({"cp": 2}, "old log-probs")),
    ],
    4: [({**_SP, "pp": 2}, "update"), ({**_SP, "cp": 2}, "update")],
}
ZERO_ADVANTAGES: dict[int, tuple[AlgorithmName, ...]] = {
    2: get_args(AlgorithmName),
    4: ("grpo", "reinforce_pp"),  # one that leaves answers out, one that does not
}

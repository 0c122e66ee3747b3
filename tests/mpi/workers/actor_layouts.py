"""Cases by ranks. Imports neither torch nor megatron: tests read it, too."""

from __future__ import annotations

from typing import Any

from megatron_tlt.config.algorithm import AlgorithmName

_SP = {"tp": 2, "sequence_parallel": True}
FORWARDS = ("update", "old log-probs", "scoring")
# Which forward hands the states out, and how ranks that share an answer gather them, are independent.
HIDDEN: dict[int, list[tuple[dict[str, Any], str]]] = {
    1: [*(({}, forward) for forward in FORWARDS), ({"recompute": "full"}, "update")],
    2: [
        *(({"pp": 2}, "update"), ({"pp": 2}, "scoring"), ({}, "update")),
        *(({**_SP, "recompute": "full"}, "update"), ({"cp": 2}, "old log-probs")),
    ],
    4: [({**_SP, "pp": 2}, "update"), ({**_SP, "cp": 2}, "update")],
}
# Which answers an algorithm leaves out: tests/unit/algorithms and test_batch_assembly.py, for all of them.
ZERO_ADVANTAGES: dict[int, tuple[AlgorithmName, ...]] = {2: ("grpo", "gspo"), 4: ("grpo",)}

"""Operations of the host in a piece of code, counted from its byte code: the same number on every machine."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Calls of functions, of numpy and of torch, and what numpy writes with operators and brackets. Names of 3.11 and 3.12.
_COUNTED = {
    "CALL", "CALL_FUNCTION_EX", "BINARY_OP", "COMPARE_OP", "UNARY_NEGATIVE", "UNARY_INVERT",
    "BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_SLICE", "STORE_SLICE",
}  # fmt: skip


def host_operations(work: Callable[[], object]) -> Counter[str]:
    """Runs `work`; operations by "file:function", those of libraries written in Python included."""
    counts: Counter[str] = Counter()
    known: dict[CodeType, tuple[str, set[int]]] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in known:
            places = {i.offset for i in dis.get_instructions(code) if i.opname in _COUNTED}
            known[code] = f"{Path(code.co_filename).stem}:{code.co_name}", places
        name, places = known[code]
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts[name] += frame.f_lasti in places
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return counts

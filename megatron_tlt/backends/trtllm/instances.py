"""Instances of TensorRT-LLM's classes as plain data: `{CLASS: "KvCacheConfig", ...}` is made in the other process.

Only the standard library is imported: this file also runs in TensorRT-LLM's environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASS = "$class"  # marks a map that is an instance of that class of `tensorrt_llm.llmapi`
CLASSES = (
    "KvCacheConfig",
    "CudaGraphConfig",
    "SleepConfig",
    "EagleDecodingConfig",
    "Eagle3DecodingConfig",
    "NGramDecodingConfig",
)


def instantiate(value: Any, classes: Mapping[str, Any]) -> Any:
    """`value` with every marked map made an instance of its class in `classes`. Raises ValueError."""
    if isinstance(value, list):
        return [instantiate(item, classes) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: instantiate(item, classes) for key, item in value.items()}
    if CLASS not in made:
        return made
    name = made.pop(CLASS)
    if name not in classes:
        raise ValueError(f"this TensorRT-LLM has no {name}")
    return classes[name](**made)

"""What an export consists of; shared by the kinds of drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Format = Literal["hf", "sglang", "trtllm", "vllm"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """One export, in memory: tensor files and JSON files by file name."""

    tensors: dict[str, dict[str, Tensor]]
    json: dict[str, dict[str, Any]]

"""Stands for TensorRT-LLM in a child process of the tests: made from the contract that TRTLLM_CONTRACT names."""

import importlib.util
import os
import sys
from pathlib import Path

_path = Path(__file__).parents[2] / "trtllm_fake.py"
_spec = importlib.util.spec_from_file_location("trtllm_fake", _path)
_fake = importlib.util.module_from_spec(_spec)
sys.modules["trtllm_fake"] = _fake
_spec.loader.exec_module(_fake)
_fake.install(_fake.Contract.load(os.environ["TRTLLM_CONTRACT"]), os.environ)
if any(name.split(".")[0] == "megatron_tlt" for name in sys.modules):
    raise ImportError("megatron_tlt was imported in the engine's process")

"""Stands for TensorRT-LLM in a child process of the tests: the toy, of the version that TRTLLM_VERSION names."""

import os
import sys
from pathlib import Path

if any(name.split(".")[0] == "megatron_tlt" for name in sys.modules):
    raise ImportError("megatron_tlt was imported in the engine's process")

sys.path.insert(0, str(Path(__file__).parents[2]))
from trtllm_toy import install

del sys.path[0]
install(os.environ["TRTLLM_VERSION"])

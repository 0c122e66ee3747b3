"""Stands for TensorRT-LLM in a child process of the tests: made from the contract that TRTLLM_CONTRACT names."""

import os
import sys
from pathlib import Path

if any(name.split(".")[0] == "megatron_tlt" for name in sys.modules):
    raise ImportError("megatron_tlt was imported in the engine's process")

sys.path.insert(0, str(Path(__file__).parents[2]))
from trtllm_fake.contract import Contract
from trtllm_fake.package import install

del sys.path[0]
install(Contract.load(os.environ["TRTLLM_CONTRACT"]), os.environ)

"""Engines of the tests: the real server in a real child process, with the fake package for TensorRT-LLM."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.process import EngineProcess
from megatron_tlt.backends.trtllm.args import Eagle3Files, build_llm_kwargs
from megatron_tlt.backends.trtllm.backend import TrtllmBackend
from megatron_tlt.backends.trtllm.launch import trtllm_launch
from megatron_tlt.config.engine_process import TrtllmSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import Prompt, WeightBucket
from tests.helpers.fake_decoder import CharTokenizer
from tests.helpers.mpi import ROOT

FAKE = ROOT / "tests" / "helpers" / "trtllm_environment"
SHAPES = {"a.weight": (3,), "b.weight": (2, 2), "norm.weight": (4,)}
DRAFTER = {"fc.weight": (2, 3), "norm.weight": (2,), "d2t": (5,)}
PROMPTS = [Prompt(3, "q3", (4, 5, 6), "def"), Prompt(1, "q1", (7, 8), "gh")]
# A child that connects, sends the given bytes, and others again and again. Its last arguments: the socket, a number.
CHILD = """
import socket, sys, time
print("the child was here", flush=True)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[-2])
connection.sendall(bytes.fromhex({data!r}))
for _ in range(6000):
    time.sleep(0.05)
    connection.sendall(bytes.fromhex({again!r}))
"""


def python_with(folder: Path, script: str) -> str:
    """An executable that stands for the Python of TensorRT-LLM's environment and does `script` (of sh)."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def child(folder: Path, data: bytes, again: bytes = b"") -> str:
    """A Python whose engine sends `data`, and `again` twenty times a second, for five minutes."""
    program = folder / "child.py"
    program.write_text(CHILD.format(data=data.hex(), again=again.hex()))
    return python_with(folder, f'exec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"')


def fake_python(folder: Path, version: str = "1.2.1") -> str:
    """The Python of an environment that has the fake package."""
    run = f'exec {shlex.quote(sys.executable)} "$@"'
    paths = f'{shlex.quote(str(FAKE))}:"$PYTHONPATH"'
    return python_with(folder, f"export TRTLLM_VERSION={version} PYTHONPATH={paths}\n{run}")


def start_backend(
    folder: Path, *, version: str = "1.2.1", eagle: bool = False, draft_len: int = 3, **fields: Any
) -> TrtllmBackend:
    """A backend whose engine stands, with a drafter for `eagle`, and has no weights. `fields`: of `rollout.trtllm`."""
    settings = TrtllmSection(python=fake_python(folder, version), **fields)
    drafting = SpeculationSection(drafter="eagle" if eagle else "none", draft_len=draft_len)
    sizes = {"max_running_requests": 8, "max_batched_tokens": 64}
    rollout = RolloutSection(**sizes, speculation=drafting, trtllm=settings, release_cache=True)
    process = EngineProcess(trtllm_launch(settings))
    files = Eagle3Files(Path("/drafter"), (0, 1, 2)) if eagle else None
    model = ModelSection(path="/model", max_context=64)
    process.start(llm=build_llm_kwargs(rollout, model, process.engine_version, files))
    whole = SimpleNamespace(kind="eagle3", vocabulary_shapes=dict)  # of a drafter with the policy's whole vocabulary
    drafter = SimpleNamespace(weights=DRAFTER, config=whole) if eagle else None
    return TrtllmBackend(
        process,
        ServedWeights(SHAPES, ["lm_head.weight"], keep_checksums=True),
        EngineOptions(rollout, model, drafter=drafter, tokenizer=CharTokenizer()),
        (0,),
    )


def tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors, of different types."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: t.bfloat16() if n == "b.weight" else t.long() if n == "d2t" else t for n, t in made.items()}


def push(
    backend: TrtllmBackend, version: int, seed: int = 0, drafter: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A whole weight sync in two buckets; returns what was pushed."""
    weights = tensors(SHAPES, seed)
    names = list(weights)
    backend.begin_update(version)
    for part in (names[:2], names[2:]):
        backend.update_weights(WeightBucket(version, [(n, weights[n]) for n in part]))
    if drafter is not None:
        backend.update_drafter(drafter, version)
    backend.finish_update()
    return weights

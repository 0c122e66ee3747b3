"""vLLM's own functions around memory, in its environment on CPU: what it asks of a GPU, how it sleeps and wakes."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from megatron_tlt.backends.process import child_environment
from megatron_tlt.backends.vllm.args import engine_args
from megatron_tlt.backends.vllm.launch import find_python, vllm_launch
from megatron_tlt.config.rollout import RolloutSection
from tests.helpers.mpi import ROOT
from tests.helpers.vllm_engines import MODEL, NEEDS_VLLM

pytestmark = list(NEEDS_VLLM)
ROLLOUT = RolloutSection(backend="vllm", max_running_requests=2, max_batched_tokens=512)


def in_vllm(what: str, argument: str) -> Any:
    python = find_python(ROLLOUT.vllm)
    assert python is not None
    environment = child_environment(os.environ, str(ROOT), vllm_launch(ROLLOUT, "cpu").environment)
    command = [python, "-m", "tests.integration.workers.vllm_memory", what, argument]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("result:")[-1])


def test_vllm_starts_beside_a_policy_that_has_most_of_the_gpu() -> None:
    ours = engine_args(ROLLOUT, MODEL, 1 << 28, None, "cuda")["gpu_memory_utilization"]
    assert in_vllm("request_memory", str(ours)) <= 1 << 30
    assert "less than desired GPU memory utilization" in in_vllm("request_memory", "0.92"), "vLLM's default"


def test_vllm_sleeps_and_wakes_in_the_order_of_a_step() -> None:
    """Its engine, scheduler and executor; the worker's memory pool, which needs a GPU, is a list of calls."""
    arguments = engine_args(ROLLOUT, MODEL, 1 << 28, None, "cpu")
    found = in_vllm("sleep", json.dumps(arguments))
    cache = [["discard", ["kv_cache"]], ["wake_up", ["kv_cache"]]]
    assert found["calls"] == [cache[0], ["sleep", 2], ["wake_up", ["weights"]], cache[1], *cache]
    assert found["asleep"] and found["awake"]
    assert [found[name] for name in ("before", "after", "again")] == [2, 2, 2]

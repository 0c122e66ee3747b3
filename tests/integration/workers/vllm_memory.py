"""Runs in vLLM's environment: its own functions and state machine around memory, without a GPU. Prints JSON.

request_memory SHARE       what vLLM asks of 80 GiB, 35 of them free, or its refusal
sleep ARGUMENTS            calls that reach the worker of an engine while it sleeps and wakes; tokens of a request
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from megatron_tlt.backends.vllm.plugin import adapter, compat

GIB = 1 << 30


def request_memory(share: str) -> Any:
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    snapshot = MemorySnapshot(free_memory=35 * GIB, total_memory=80 * GIB, device="cpu", auto_measure=False)
    try:
        return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=float(share)))
    except ValueError as error:
        return str(error)


def sleep(arguments: str) -> Any:
    from vllm import SamplingParams
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert compat.differences(adapter.version()) == []
    calls: list[Any] = []
    CPUWorker.sleep = lambda self, level=1: calls.append(["sleep", level])  # type: ignore[method-assign]
    CPUWorker.wake_up = lambda self, tags=None: calls.append(["wake_up", tags])  # type: ignore[method-assign]
    CPUWorker.discard = lambda self, tags: calls.append(["discard", list(tags)])  # type: ignore[method-assign]
    engine = adapter.start_engine(json.loads(arguments), records_routers=False)
    engine.collective_rpc("tlt_install", args=(0, 64, 2, {"drafter": "none"}, None, None))
    seen = {}

    def steps(name: str) -> None:
        params = SamplingParams(max_tokens=2, detokenize=False, extra_args={"tlt": [7, 1.0, 0, 1.0, 0.0, 0]})
        engine.add_request(name, {"prompt_token_ids": [1, 2, 3]}, params)
        ended: list[Any] = []
        while not ended:  # as the server: no step behind the last response
            ended = [output for output in engine.step() if output.finished]
        seen[name] = len(ended[0].outputs[0].token_ids)

    steps("before")
    adapter.sleep_cache(engine)
    adapter.sleep_weights(engine)
    adapter.wake(engine, ["weights"])
    seen["asleep"] = engine.is_sleeping()
    adapter.wake(engine, ["kv_cache"])
    seen["awake"] = not engine.is_sleeping()
    steps("after")
    adapter.sleep_cache(engine)
    adapter.wake(engine, ["kv_cache"])
    steps("again")
    engine.engine_core.shutdown()
    return {"calls": calls, **seen}


if __name__ == "__main__":
    result = {"request_memory": request_memory, "sleep": sleep}[sys.argv[1]](sys.argv[2])
    print("result:", json.dumps(result), flush=True)

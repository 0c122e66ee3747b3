"""vLLM's rollouts around a weight sync: it rolls out, sleeps, takes the same weights, wakes, and must say the same.

Its KV cache sleeps behind each rollout and its weights until the sync, as `rollout.release_cache` has it on CUDA.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.engines import open_side, push
from benchmarks.gpu.result import Result
from benchmarks.gpu.speculation import open_prompts, policy_and_drafter
from megatron_tlt.backends.vllm.launch import find_python, setup_hint
from megatron_tlt.config.engine_process import VllmSection
from megatron_tlt.errors import BackendError
from megatron_tlt.types import GenerateCall

CYCLES = 2


def run(check: Check, found: Result) -> None:
    """Two cycles with drafts."""
    if find_python(VllmSection()) is None:
        found.note({"skipped": f"no vLLM: {setup_hint(check.device.type)}"})
        return
    folders, batch = policy_and_drafter(check), 4 if check.smoke else 64
    try:
        backend = open_side(check, "vllm", "on", folders, batch, release_cache=True)
        prompts, params = open_prompts(folders[0], batch, 16 if check.smoke else 128)
        drawn = []
        for cycle in range(CYCLES + 1):
            started = time.perf_counter()
            drawn.append([sample.token_ids for sample in backend.generate(GenerateCall(prompts, params, 1))])
            rolled = time.perf_counter() - started
            free = torch.cuda.mem_get_info(check.device)[0] / 2**30 if check.is_cuda else 0.0
            backend.release_weights()
            started = time.perf_counter()
            push(backend, folders[0], cycle + 1)
            row = {"cycle": cycle, "rollout_s": rolled, "push_s": time.perf_counter() - started}
            found.add_row(row | {"free_gib": free, "same": float(drawn[-1] == drawn[0])})
        backend.close()
    except BackendError as error:
        found.fail(str(error).partition("\n")[0])
        return
    found.note({"push_s": found.rows[-1]["push_s"], "same_responses": min(row["same"] for row in found.rows)})
    if found.summary["same_responses"] != 1.0:
        found.fail("responses differ behind a sleep and a sync of the same weights")

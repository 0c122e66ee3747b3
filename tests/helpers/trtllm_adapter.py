"""Everything that the adapter asks of TensorRT-LLM, once, against a fake made from a contract, in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_tlt.backends.process import child_environment
from megatron_tlt.backends.transport import in_shared_memory
from megatron_tlt.backends.trtllm.args import (
    SLEEP_TAGS,
    Eagle3Files,
    build_llm_kwargs,
    build_sampling_params,
)
from megatron_tlt.backends.trtllm.build import launch_of
from megatron_tlt.backends.trtllm.server import Host
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.trtllm import TrtllmSection
from megatron_tlt.types import SamplingParams
from tests.helpers.trtllm_fake.contract import Contract
from tests.helpers.trtllm_fake.package import install, uninstall
from tests.helpers.trtllm_fake.toy import ENDLESS

EXTENSION = "megatron_tlt.backends.trtllm.extension"
SPECULATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"speculation": "ngram", "draft_len": 3},
    {"draft_len": 3},  # EAGLE-3
)


def run_adapter(contract: Contract) -> None:
    """Raises if a name that the adapter uses is not the contract's."""
    section = TrtllmSection(python="python")
    try:
        for spec in SPECULATIONS:
            sys.modules.pop(EXTENSION, None)
            install(contract, child_environment({}, "/package", launch_of(section).environment))
            asyncio.run(_talk(contract, spec))
    finally:
        uninstall()
        sys.modules.pop(EXTENSION, None)


async def _talk(contract: Contract, spec: dict[str, Any]) -> None:
    responses: list[dict[str, Any]] = []
    drafter = Eagle3Files(Path("/drafter"), (1, 2, 3)) if spec.keys() == {"draft_len"} else None
    kind = "eagle3" if drafter else spec.get("speculation", "none")
    host = Host(responses.append)
    version = contract.data["version"]
    assert host.engine_version() == version
    section = TrtllmSection(version=version, **spec)
    rollout = RolloutSection(dtype="bf16", max_running_requests=8, max_batched_tokens=32, trtllm=section)
    kwargs = build_llm_kwargs(rollout, ModelSection(path="/model", max_context=64), drafter)
    await host.do_start({"llm": kwargs})
    await _push(host, with_drafter=kind == "eagle3")
    for top_k, min_p in ((0, 0.0), (5, 0.1 if kind == "none" else 0.0)):
        sampling = SamplingParams(top_k=top_k, top_p=0.9, min_p=min_p, max_tokens=8)
        params = build_sampling_params(sampling, (0,))
        for i in range(4):
            host.submit({"id": top_k * 10 + i, "key": 2 * i, "token_ids": [5, 6, 7], "params": params})
    await _until(lambda: not host.in_flight)
    host.submit({"id": 99, "key": 0, "token_ids": [ENDLESS], "params": params})
    await host.do_abort({})  # at once: also a request that has not begun is aborted
    assert responses[-1]["id"] == 99, "answered before the reply"
    await _until(lambda: not host.in_flight)
    _check_responses(responses)
    totals = (await host.do_stats({}))["totals"]
    assert totals["iterations"] > 0
    per_step = 0 if kind == "none" else 1
    assert (
        totals["numAcceptedTokens"] == totals["numRequestsWithDraftTokens"] == per_step * totals["iterations"]
    )
    assert totals["numDraftTokens"] == 3 * per_step * totals["iterations"]
    for operation in (host.do_release, host.do_resume):
        await operation({"tags": list(SLEEP_TAGS)})
    host.shutdown()


async def _until(happens: Callable[[], bool]) -> None:
    """Lets the toy work; it needs a few turns of the loop, or something is wrong."""
    for _ in range(1000):
        if happens():
            return
        await asyncio.sleep(0)
    raise RuntimeError("the engine does not come to an end")


async def _push(host: Host, with_drafter: bool) -> None:
    await host.do_begin_update({})
    with TemporaryDirectory() as folder, in_shared_memory([("a.weight", torch.ones(2))], Path(folder)) as location:
        message = {"tensors": location, "verify": True}
        replies = [await host.do_weights(message)]
        await host.do_finish_update({})
        replies += [await host.do_drafter(message)] if with_drafter else []
    assert all(set(reply["checksums"]) == {"a.weight"} for reply in replies)


def _check_responses(responses: list[dict[str, Any]]) -> None:
    failed = [a for a in responses if "error" in a]
    assert failed == [], failed
    reasons = {a["id"]: a["finish_reason"] for a in responses}
    assert reasons.pop(99) == "cancelled"
    assert set(reasons.values()) == {"stop", "length"}, "both ends, by their names"
    samples = [tuple(a["token_ids"]) for a in responses if a["id"] < 4]
    assert len(set(samples)) == 4, "samples of one prompt differ: the temperature is not ignored"

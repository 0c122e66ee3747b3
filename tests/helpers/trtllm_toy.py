"""A toy TensorRT-LLM, for a child process of the tests: tokens from a hash of the policy's weights, prompt and seed.

Classes of arguments take the fields of the recorded signatures and raise TypeError at any other. Standard library only.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
import types
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIGNATURES = ROOT / "tests" / "contracts" / "trtllm" / "signatures"
SOURCES = {"1.2.1": "llm_args-2026-02", "1.3.0rc27": "llm_args-late-1.3"}  # the records nearest to a version
REFUSED, ENDLESS = 101, 102  # prompts with this token are refused, or run until they are aborted
VOCABULARY = 26
VARIABLES = ("TLLM_DISABLE_MPI", "TLLM_RAY_FORCE_LOCAL_CLUSTER", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
MEMORY_TAGS = {"kv_cache"}


def recorded_fields(version: str) -> dict[str, set[str]]:
    """Fields of each class of arguments, those of its bases included."""
    classes: dict[str, Any] = {}
    for name in (SOURCES[version], "sampling_params-000a01de"):
        classes |= json.loads((SIGNATURES / f"{name}.json").read_text())["classes"]
    return {name: names_of(name, classes) for name in classes}


def names_of(name: str, classes: dict[str, Any]) -> set[str]:
    """Fields and aliases of a recorded class with those of its bases in the same sources."""
    if name not in classes:
        return set()
    others = {other: entry for other, entry in classes.items() if other != name}
    bases = (base.split("[")[0].split(".")[-1] for base in classes[name]["bases"])
    return set(classes[name]["fields"]).union(*(names_of(base, others) for base in bases))


class Arguments:
    """A class of arguments: keeps them."""

    fields: frozenset[str]

    def __init__(self, **given: Any) -> None:
        for name in sorted(given.keys() - self.fields):
            raise TypeError(f"{type(self).__name__} got an unexpected argument {name!r}")
        self.given = given


class Output:
    """One request. Awaiting it gives the output itself, with one completion."""

    def __init__(self, engine: AsyncLLM, token_ids: list[int], params: Arguments):
        self._engine, self._prompt, self._params = engine, token_ids, params.given
        self._aborted = asyncio.Event()
        self.outputs: list[Any] = []

    def abort(self) -> None:
        self._aborted.set()

    def __await__(self) -> Any:
        return self._finish().__await__()

    async def _finish(self) -> Output:
        if ENDLESS in self._prompt:
            await self._aborted.wait()
            tokens, reason = [1], "cancelled"
        else:
            await asyncio.sleep(0)
            tokens, reason = self._engine.respond(self._prompt, self._params)
        self.outputs = [types.SimpleNamespace(token_ids=tokens, finish_reason=reason)]
        return self


class AsyncLLM:
    """The engine, with one worker that holds checksums of the weights."""

    arguments: type[Arguments]

    def __init__(self, *, ray_worker_extension_cls: str, **given: Any):
        for name in VARIABLES:
            if os.environ.get(name) != "1":
                raise RuntimeError(f"{name} is not 1")
        self._given = self.arguments(**given).given
        self.can_sleep = bool(self._given.get("enable_sleep") or self._given.get("sleep_config"))
        self._drafting: Arguments | None = self._given.get("speculative_config")
        path, _, name = ray_worker_extension_cls.rpartition(".")
        self._worker = getattr(importlib.import_module(path), name)(self._drafting is not None)
        self._records: list[dict[str, Any]] = []
        self._asleep: set[str] = set()
        self._is_ready = False

    async def setup_async(self) -> None:
        self._is_ready = True

    def generate_async(self, inputs: list[int], sampling_params: Arguments) -> Output:
        if not self._is_ready or self._asleep:
            raise RuntimeError("the engine is not awake")
        if REFUSED in inputs:
            raise ValueError("this prompt is refused")
        if len(inputs) > self._given["max_input_len"]:
            raise ValueError("the prompt is too long")
        return Output(self, inputs, sampling_params)

    def respond(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        """A function of weights, prompt and seed; without the seed where the engine would decode greedily."""
        drafts = self._drafting is not None
        is_greedy = drafts and not self._drafting.given["allow_advanced_sampling"]  # type: ignore[union-attr]
        is_greedy |= (params.get("top_k") is None and params.get("top_p") is None) or params["top_k"] == 1
        weights = sorted(self._worker.weights.items())
        rng = random.Random(repr((weights, list(prompt), 0 if is_greedy else params["seed"])))
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(params["max_tokens"])]
        length, stops = rng.randrange(2 * params["max_tokens"]), params["stop_token_ids"] or []
        if length < params["max_tokens"]:
            tokens[length:] = stops[:1] or tokens[length:]
        at = next((i for i, token in enumerate(tokens) if token in stops), None)
        if at is not None:
            tokens = tokens[: at + bool(params["include_stop_str_in_output"])]
        self._count(len(tokens))
        return tokens, "length" if at is None else "stop"

    def _count(self, tokens: int) -> None:
        """Iterations of one request: with a drafter two tokens each, one of them drafted and accepted of three."""
        counts = {"numDraftTokens": 3, "numAcceptedTokens": 1, "numRequestsWithDraftTokens": 1}
        if self._drafting is None:
            self._records += [{} for _ in range(tokens)]
        else:
            self._records += [{"specDecodingStats": counts} for _ in range(-(-tokens // 2))]

    def get_stats(self, timeout: float) -> list[dict[str, Any]]:
        if not self._given["enable_iter_perf_stats"]:
            raise RuntimeError("enable_iter_perf_stats is off")
        records, self._records = self._records, []
        return records

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    async def update_weights(self, weights: Any) -> None:
        self._worker.update_weights(weights)

    async def release(self, tags: list[str]) -> None:
        if not self.can_sleep or not MEMORY_TAGS.issuperset(tags):
            raise ValueError(f"no memory to release: {tags}")
        self._asleep |= set(tags)

    async def resume(self, tags: list[str]) -> None:
        for tag in tags:
            self._asleep.remove(tag)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """The class that ours derives from; it stands for the worker, too."""

    device_id = "cpu"

    def __init__(self, has_drafter: bool):
        self.weights: dict[str, int] = {}
        self._is_final = False
        config = types.SimpleNamespace(architectures=["LlamaForCausalLMEagle3"])
        model = types.SimpleNamespace(
            draft_model=object() if has_drafter else None,
            draft_config=types.SimpleNamespace(pretrained_config=config),
            load_draft_weights=self._load_drafter,
        )
        engine = types.SimpleNamespace(model=model)
        self.engine = types.SimpleNamespace(model_engine=engine, reset_prefix_cache=lambda: None)

    def update_weights(self, ipc_handles: Any = None) -> None:
        self._is_final = ipc_handles is None
        for name, (function, args) in (ipc_handles or {}).get("GPU-cpu", ()):
            arguments = list(args)
            arguments[6] = "cpu"
            self.weights[name] = zlib.crc32(_bytes_of(function(*arguments)))

    def _load_drafter(self, weights: dict[str, Any], weight_mapper: Any) -> None:
        assert weight_mapper is not None and weights
        if not self._is_final:
            raise RuntimeError("the policy whose embedding it shares is not complete")


class AutoCheckpointMapper:
    """Gives the mapper of one architecture."""

    @staticmethod
    def get(format: str, name: str) -> Any:
        if (format, name) != ("HF", "LlamaForCausalLMEagle3"):
            raise ValueError(f"no mapper for {format} {name}")
        return types.SimpleNamespace(init_model_and_config=lambda model, config: None)


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def install(version: str) -> None:
    """Puts `tensorrt_llm` of this version and its modules into `sys.modules`."""
    fields = recorded_fields(version)
    made = {name: type(name, (Arguments,), {"fields": frozenset(known)}) for name, known in fields.items()}
    AsyncLLM.arguments = made["TorchLlmArgs"]
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": version, "AsyncLLM": AsyncLLM},
        ".llmapi": made,
        ".llmapi.rlhf_utils": {"WorkerExtension": WorkerExtension},
        "._ray_utils": {"control_action_decorator": lambda function: function},
        "._torch": {},
        "._torch.utils": {"get_device_uuid": lambda device: f"GPU-{device}"},
        "._torch.models": {},
        "._torch.models.checkpoints": {},
        "._torch.models.checkpoints.auto_mapper": {"AutoCheckpointMapper": AutoCheckpointMapper},
    }
    for path, members in modules.items():
        name = f"tensorrt_llm{path}"
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__dict__.update(members, __path__=[])
        if path:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)

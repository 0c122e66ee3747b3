"""What the fake engine does: tokens from a hash of the policy's weights, the prompt and the seed."""

from __future__ import annotations

import asyncio
import importlib
import random
import zlib
from typing import Any

from .classes import Fake
from .contract import RecordedDict

REFUSED, ENDLESS = 101, 102  # prompts with this token are refused, or run until they are aborted
VOCABULARY = 26


def make_mapper(fake: Fake) -> type:
    def get(format: str, name: str) -> Any:
        where = ("literals", "weight_format", "values")
        known = fake.contract.find(format, *where)
        if known is None or name != "LlamaForCausalLMEagle3":
            raise ValueError(f"no mapper for {format} {name}")
        fake.contract.use(*where, known)
        return fake.thing("Mapper", {}, {"init_model_and_config": lambda this, model, config: None})

    fake.contract.use("classes", "AutoCheckpointMapper")
    members = fake.methods("AutoCheckpointMapper", {"get": get})
    return type(fake.contract.name("classes", "AutoCheckpointMapper"), (), members)


def make_worker_extension(fake: Fake) -> type:
    """The class that ours derives from. One worker: it holds the toy's weights."""
    contract = fake.contract

    def init(this: Any, with_drafter: bool) -> None:
        state: dict[str, Any] = {"weights": {}, "drafter": {}, "resets": 0, "final": False}

        def reset(*_: Any) -> None:
            state["resets"] += 1

        def load_drafter(_: Any, weights: dict[str, Any], weight_mapper: Any) -> None:
            assert weight_mapper is not None
            if not state["final"]:
                raise RuntimeError("the policy whose embedding it shares is not complete")
            state["drafter"] = {name: zlib.crc32(bytes_of(t)) for name, t in weights.items()}

        pretrained = fake.thing("PretrainedConfig", {"architectures": ["LlamaForCausalLMEagle3"]})
        attributes = {
            "draft_model": object() if with_drafter else None,
            "draft_config": fake.thing("DraftConfig", {"pretrained_config": pretrained}),
        }
        model = fake.thing("Model", attributes, {"load_draft_weights": load_drafter})
        engine = {"model_engine": fake.thing("ModelEngine", {"model": model})}
        this.__dict__["fake_state"] = state
        this.__dict__["fake_values"] = {
            "engine": fake.thing("Engine", engine, {"reset_prefix_cache": reset}),
            "device_id": "cpu",
        }

    def read(this: Any, name: str) -> Any:
        key = contract.find(name, "classes", "WorkerExtension", "attributes")
        if key is None:
            raise AttributeError(f"WorkerExtension has no {name}")
        contract.use("classes", "WorkerExtension", "attributes", key)
        return this.__dict__["fake_values"][key]

    def update(this: Any, ipc_handles: Any = None) -> None:
        state = this.__dict__["fake_state"]
        if ipc_handles is None:
            state["final"] = True
            return
        state["final"] = False
        for name, (function, args) in ipc_handles["GPU-cpu"]:
            arguments = list(args)
            arguments[6] = "cpu"
            state["weights"][name] = zlib.crc32(bytes_of(function(*arguments)))

    contract.use("classes", "WorkerExtension")
    members = fake.methods("WorkerExtension", {"update_weights": update})
    return type(
        contract.name("classes", "WorkerExtension"), (), {**members, "__init__": init, "__getattr__": read}
    )


def bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class Running:
    """One request of the toy."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()
        self.tokens: list[int] = []
        self.reason = ""


class ToyEngine:
    """What the fake AsyncLLM does, by the contract's entries and not by its names."""

    def __init__(self, fake: Fake, values: dict[str, Any]):
        self.fake, self.values = fake, values
        self.records: list[Any] = []
        self.iterations = 0
        self.asleep: set[str] = set()
        self.ready = False
        for variable in fake.contract.data["environment"]:
            if fake.environ.get(fake.contract.use("environment", variable)) != "1":
                raise RuntimeError(f"{fake.contract.name('environment', variable)} is not 1")
        path, _, name = values["ray_worker_extension_cls"].rpartition(".")
        extension = getattr(importlib.import_module(path), name)
        self.worker = type("Worker", (extension,), {})(values["speculative_config"] is not None)

    def generate(self, token_ids: list[int], params: Any) -> Any:
        if not self.ready or self.asleep:
            raise RuntimeError("the engine is not awake")
        if REFUSED in token_ids:
            raise ValueError("this prompt is refused")
        if len(token_ids) > self.values["max_input_len"]:
            raise ValueError("the prompt is too long")
        running = Running()
        fake = self.fake
        done = {"token_ids": None, "finish_reason": None, "logprobs": None}
        completion = fake.thing("CompletionOutput", done)
        output = fake.thing(
            "RequestOutput", {"outputs": [completion]}, {"abort": lambda _: running.aborted.set()}
        )

        async def finish() -> Any:
            if ENDLESS in token_ids:
                await running.aborted.wait()
                done["token_ids"], reason = [1], "cancelled"
            else:
                await asyncio.sleep(0)
                done["token_ids"], reason = self.response(token_ids, params.values)
                self.note(len(done["token_ids"]))
            done["finish_reason"] = fake.contract.use("literals", "finish_reason", "values", reason)
            return output

        type(output).__await__ = lambda _: finish().__await__()
        return output

    def response(self, token_ids: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        """A function of weights, prompt and seed; without the seed where the engine would decode greedily."""
        spec = self.values["speculative_config"]
        one_model = spec is not None and spec.fake_id.startswith("Eagle")
        greedy = one_model and not spec.values["allow_advanced_sampling"]
        greedy |= (params["top_k"] is None and params["top_p"] is None) or params["top_k"] == 1
        weights = sorted(self.worker.__dict__["fake_state"]["weights"].items())
        rng = random.Random(repr((weights, list(token_ids), 0 if greedy else params["seed"])))
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(params["max_tokens"])]
        length, stops = rng.randrange(2 * params["max_tokens"]), params["stop_token_ids"] or []
        if length < params["max_tokens"]:
            tokens[length:] = stops[:1] or tokens[length:]
        for place, token in enumerate(tokens):
            if token in stops:
                return tokens[: place + bool(params["include_stop_str_in_output"])], "stop"
        return tokens, "length"

    def note(self, tokens: int) -> None:
        """Iterations of one request: with a drafter two tokens each, one of them drafted and accepted of three."""
        drafting = self.values["speculative_config"] is not None
        contract = self.fake.contract
        for _ in range(-(-tokens // 2) if drafting else tokens):
            values: dict[str, Any] = {"iter": self.iterations, "numActiveRequests": 1}
            counts = {"numDraftTokens": 3, "numAcceptedTokens": 1, "numRequestsWithDraftTokens": 1}
            if drafting:
                values["specDecodingStats"] = RecordedDict(contract, ("stats", "drafting"), counts)
            self.records.append(RecordedDict(contract, ("stats", "record"), values))
            self.iterations += 1

    def take_stats(self) -> list[Any]:
        if not self.values["enable_iter_perf_stats"]:
            raise RuntimeError("enable_iter_perf_stats is off")
        records, self.records = self.records, []
        return records

    def sleep(self, tags: list[str], wake: bool) -> None:
        if not (self.values.get("enable_sleep") or self.values.get("sleep_config")):
            raise RuntimeError("sleep is not enabled")
        where = ("literals", "memory_tag", "values")
        for tag in tags:
            known = self.fake.contract.find(tag, *where)
            if known is None:
                raise ValueError(f"no such memory: {tag}")
            self.fake.contract.use(*where, known)
            if wake:
                self.asleep.remove(known)
            else:
                self.asleep.add(known)

    def rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


def make_llm(fake: Fake) -> type:
    contract = fake.contract

    def init(this: Any, **given: Any) -> None:
        contract.use("classes", "AsyncLLM")
        this.toy = ToyEngine(fake, fake.checked("AsyncLLM", given))

    async def setup(this: Any) -> Any:
        this.toy.ready = True
        return this

    async def release(this: Any, tags: list[str]) -> None:
        this.toy.sleep(tags, wake=False)

    async def resume(this: Any, tags: list[str]) -> None:
        this.toy.sleep(tags, wake=True)

    async def update(this: Any, weights: Any) -> None:
        this.toy.rpc(contract.name("classes", "WorkerExtension", "methods", "update_weights"), (weights,))

    async def rpc(
        this: Any, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, **_: Any
    ) -> list[Any]:
        assert not kwargs
        return this.toy.rpc(method, args)

    def generate(this: Any, inputs: list[int], sampling_params: Any = None, **_: Any) -> Any:
        if getattr(sampling_params, "fake_id", None) != "SamplingParams":
            raise TypeError("sampling_params")
        return this.toy.generate(inputs, sampling_params)

    bodies = {
        "setup_async": setup,
        "release": release,
        "resume": resume,
        "update_weights": update,
        "collective_rpc": rpc,
        "generate_async": generate,
        "get_stats": lambda this, timeout=2: this.toy.take_stats(),
        "shutdown": lambda this: None,
    }
    return type(
        contract.name("classes", "AsyncLLM"), (), {**fake.methods("AsyncLLM", bodies), "__init__": init}
    )

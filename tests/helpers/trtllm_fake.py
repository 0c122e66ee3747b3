"""A `tensorrt_llm` made from a recorded contract: it knows the contract's names and raises at any other.

It notes every name that is used, so that a test can rename each of them in turn. What it answers is a toy: tokens from
a hash of the policy's weights, the prompt and the seed. Standard library only, for it also runs in child processes.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import random
import sys
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REFUSED, ENDLESS = 101, 102  # prompts with this token are refused, or run until they are aborted
VOCABULARY = 26


class Contract:
    """The recorded names; `names` maps every entry to what it is called, and using one notes it."""

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.used: set[tuple[str, ...]] = set()

    @classmethod
    def load(cls, path: str | Path) -> Contract:
        return cls(json.loads(Path(path).read_text()))

    def at(self, *path: str) -> dict[str, Any]:
        node = self.data
        for key in path:
            node = node[key]
        return node

    def name(self, *path: str) -> str:
        return self.at(*path).get("name", path[-1])

    def use(self, *path: str) -> str:
        self.used.add(path)
        return self.name(*path)

    def find(self, name: str, *path: str) -> str | None:
        """The entry below `path` that is called so."""
        return next((key for key in self.at(*path) if self.name(*path, key) == name), None)

    def renamed(self, path: tuple[str, ...]) -> Contract:
        data = copy.deepcopy(self.data)
        other = Contract(data)
        entry = other.at(*path)
        entry["name"] = other.name(*path) + "_renamed"
        return other


CHECKS: dict[str, Callable[[Any], bool]] = {
    "any": lambda v: True,
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, float | int) and not isinstance(v, bool),
    "list[int]": lambda v: isinstance(v, list) and all(type(i) is int for i in v),
}


class Fake:
    """The package for one contract; `environ` is what its process was given."""

    def __init__(self, contract: Contract, environ: Mapping[str, str]):
        self.contract, self.environ = contract, environ
        self.classes: dict[str, type] = {}

    # -- classes that are only told things ---------------------------------------------------------------------

    def record(self, cls: str) -> type:
        """A class whose constructor takes exactly the contract's fields."""
        fake, contract = self, self.contract

        def init(this: Any, **given: Any) -> None:
            contract.use("classes", cls)
            this.__dict__["values"] = fake.checked(cls, given)

        made = type(contract.name("classes", cls), (), {"__init__": init, "fake_id": cls})
        self.classes[cls] = made
        return made

    def checked(self, cls: str, given: dict[str, Any]) -> dict[str, Any]:
        """Values by entry, defaults included. Raises TypeError, ValueError."""
        contract, fields = self.contract, self.contract.at("classes", cls, "fields")
        values = {key: field.get("default") for key, field in fields.items()}
        for name, value in given.items():
            key = contract.find(name, "classes", cls, "fields")
            if key is None:
                raise TypeError(f"{contract.name('classes', cls)} got an unexpected argument {name!r}")
            contract.use("classes", cls, "fields", key)
            self.check_value(cls, key, value)
            values[key] = value
        missing = [k for k, field in fields.items() if field.get("required") and values[k] is None]
        if missing:
            raise TypeError(f"{cls} lacks {missing}")
        one_of = contract.at("classes", cls).get("exactly_one_of")
        if one_of and sum(bool(values[k]) for k in one_of) != 1:
            raise ValueError(f"{cls}: exactly one of {one_of}")
        return values

    def check_value(self, cls: str, key: str, value: Any) -> None:
        field = self.contract.at("classes", cls, "fields", key)
        kind = field["type"]
        if value is None and (field.get("default", 0) is None or kind.endswith("?")):
            return
        if kind in CHECKS:
            good = CHECKS[kind](value)
        elif kind == "speculative":
            good = self.contract.at("classes", getattr(value, "fake_id", "SamplingParams")).get(
                "speculative", False
            )
        else:
            good = getattr(value, "fake_id", None) == kind.rstrip("?")
        if not good:
            raise TypeError(f"{cls}.{key} takes {kind}, not {value!r}")
        literals = field.get("literals")
        if literals is not None:
            where = ("classes", cls, "fields", key, "literals")
            known = self.contract.find(value, *where)
            if known is None:
                raise ValueError(f"{cls}.{key} = {value!r} is none of {list(literals)}")
            self.contract.use(*where, known)

    # -- classes that do things --------------------------------------------------------------------------------

    def methods(self, cls: str, bodies: dict[str, Callable[..., Any]]) -> dict[str, Any]:
        """The contract's methods under the contract's names, with the contract's parameters."""
        contract = self.contract
        made: dict[str, Any] = {}
        for key, entry in contract.at("classes", cls, "methods").items():
            made[contract.name("classes", cls, "methods", key)] = self.method(cls, key, entry, bodies[key])
        return made

    def method(self, cls: str, key: str, entry: dict[str, Any], body: Callable[..., Any]) -> Any:
        contract = self.contract
        params = list(entry["params"])
        where = ("classes", cls, "methods", key, "params")

        def call(*args: Any, **kwargs: Any) -> Any:
            contract.use("classes", cls, "methods", key)
            this = () if entry.get("static") else args[:1]
            rest = args if entry.get("static") else args[1:]
            if len(rest) > len(params):
                raise TypeError(f"{cls}.{key} takes {params}")
            bound = dict(zip(params, rest, strict=False))
            for name, value in kwargs.items():
                known = contract.find(name, *where)
                if known is None:
                    raise TypeError(f"{cls}.{key} got an unexpected argument {name!r}")
                contract.use(*where, known)
                bound[known] = value
            return body(*this, **bound)

        return staticmethod(call) if entry.get("static") else call

    def thing(
        self, cls: str, values: dict[str, Any], bodies: dict[str, Callable[..., Any]] | None = None
    ) -> Any:
        """An object with the contract's attributes and methods."""
        contract = self.contract

        def read(this: Any, name: str) -> Any:
            key = contract.find(name, "classes", cls, "attributes") if not name.startswith("__") else None
            if key is None or key not in values:
                raise AttributeError(f"{cls} has no {name}")
            contract.use("classes", cls, "attributes", key)
            return values[key]

        members = self.methods(cls, bodies) if bodies else {}
        return type(cls, (), {**members, "__getattr__": read})()


class RecordedDict(dict):  # type: ignore[type-arg]
    """A map that notes which of its names are read."""

    def __init__(self, contract: Contract, path: tuple[str, ...], values: dict[str, Any]):
        super().__init__({contract.name(*path, key): value for key, value in values.items()})
        self._contract, self._path = contract, path

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._contract.use(*self._path, str(self._contract.find(name, *self._path)))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


def install(contract: Contract, environ: Mapping[str, str]) -> Fake:
    """Puts the package and its modules into sys.modules."""
    from_here = Fake(contract, environ)
    modules: dict[str, types.ModuleType] = {}

    def module(path: str) -> types.ModuleType:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in modules:
                made = sys.modules.get(name) if name == "tensorrt_llm" else None
                modules[name] = made or types.ModuleType(name)
                modules[name].__dict__.setdefault("__path__", [])
                sys.modules[name] = modules[name]
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[name])
        return modules[path]

    module("tensorrt_llm").__version__ = contract.data["version"]  # type: ignore[attr-defined]
    special = {
        "AsyncLLM": make_llm,
        "WorkerExtension": make_worker_extension,
        "AutoCheckpointMapper": make_mapper,
    }
    for cls, entry in contract.data["classes"].items():
        if "module" in entry:
            made = special[cls](from_here) if cls in special else from_here.record(cls)
            setattr(module(entry["module"]), contract.name("classes", cls), made)
    bodies = {"control_action_decorator": lambda f: f, "get_device_uuid": lambda device: f"GPU-{device}"}
    for key, entry in contract.data["functions"].items():
        setattr(module(entry["module"]), contract.name("functions", key), noted(contract, key, bodies[key]))
    return from_here


def uninstall() -> None:
    """Removes the package from sys.modules."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def noted(contract: Contract, key: str, body: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        contract.use("functions", key)
        return body(*args)

    return call


def make_mapper(fake: Fake) -> type:
    def get(format: str, name: str) -> Any:  # noqa: A002 - the contract's own word
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
        state: dict[str, Any] = {"weights": {}, "drafter": {}, "resets": 0, "finished": 0}

        def reset(*_: Any) -> None:
            state["resets"] += 1

        def load_drafter(_: Any, weights: dict[str, Any], weight_mapper: Any) -> None:
            assert weight_mapper is not None
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
            state["finished"] += 1
            return
        for name, (function, args) in ipc_handles["GPU-cpu"]:
            arguments = list(args)
            arguments[6] = "cpu"
            state["weights"][name] = zlib.crc32(bytes_of(function(*arguments)))

    def reset_cache(this: Any) -> None:
        this.__dict__["fake_state"]["resets"] += 1

    contract.use("classes", "WorkerExtension")
    members = fake.methods("WorkerExtension", {"update_weights": update, "reset_prefix_cache": reset_cache})
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
                done["token_ids"], reason = self.answer(token_ids, params.values)
                self.note(len(done["token_ids"]))
            done["finish_reason"] = fake.contract.use("literals", "finish_reason", "values", reason)
            return output

        type(output).__await__ = lambda _: finish().__await__()
        return output

    def answer(self, token_ids: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        """A function of weights, prompt and seed; without the seed where the engine would decode greedily."""
        spec = self.values["speculative_config"]
        one_model = spec is not None and spec.fake_id.startswith("Eagle")
        greedy = one_model and not spec.values["allow_advanced_sampling"]
        greedy |= (params["top_k"] is None and params["top_p"] is None) or params["top_k"] == 1
        weights = sorted(self.worker.__dict__["fake_state"]["weights"].items())
        rng = random.Random(repr((weights, list(token_ids), 0 if greedy else params["seed"])))
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(params["max_tokens"])]
        length = rng.randrange(2 * params["max_tokens"])
        if length >= params["max_tokens"] or not params["stop_token_ids"]:
            return tokens, "length"
        end = params["stop_token_ids"][:1] if params["include_stop_str_in_output"] else []
        return tokens[:length] + end, "stop"

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

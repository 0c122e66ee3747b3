"""Classes of a contract: they know its names and raise at any other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .contract import CHECKS, Contract


class Fake:
    """The package for one contract; `environ` is what its process was given."""

    def __init__(self, contract: Contract, environ: Mapping[str, str]):
        self.contract, self.environ = contract, environ
        self.classes: dict[str, type] = {}

    # -- classes that only hold arguments ----------------------------------------------------------------------

    def record(self, cls: str) -> type:
        """A class whose constructor takes exactly the contract's fields."""
        fake, contract = self, self.contract

        def init(this: Any, **given: Any) -> None:
            contract.use("classes", cls)
            this.__dict__["values"] = fake.checked(cls, given)

        members = {"__init__": init, "fake_id": cls, "model_fields": self.field_names(cls)}
        made = type(contract.name("classes", cls), (), members)
        self.classes[cls] = made
        return made

    def field_names(self, cls: str) -> dict[str, None]:
        """As a pydantic model shows its fields."""
        fields = self.contract.at("classes", cls, "fields")
        return {self.contract.name("classes", cls, "fields", key): None for key in fields}

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

        shown = [
            inspect.Parameter(contract.name(*where, p), inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in params
        ]
        call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
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

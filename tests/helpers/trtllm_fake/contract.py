"""A recorded contract: names by entry, and a note of every one that is used."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        if name not in self:
            return default
        return self[name]  # noted there


CHECKS: dict[str, Callable[[Any], bool]] = {
    "any": lambda v: True,
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, float | int) and not isinstance(v, bool),
    "list[int]": lambda v: isinstance(v, list) and all(type(i) is int for i in v),
}

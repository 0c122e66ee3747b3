"""The policy's frozen embedding and LM head by policy version, for as long as there are hidden states of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_tlt.errors import DrafterError


class PolicyTables:
    """Copies of [V, H] pairs, one a version: a push overwrites the engine's own, and hidden states of the version
    before must be read by the head that they were made for. Tied tables are copied once.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None):
        """Copies go to `device`, in `dtype` (None: in the type they come in)."""
        self._device, self._dtype = device, dtype
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def set(self, version: int, embed: Tensor, head: Tensor) -> None:
        """Copies them; overwrites those of the same version."""
        tied = head.data_ptr() == embed.data_ptr() and head.shape == embed.shape
        copy = self._copy(embed)
        self._tables[version] = (copy, copy if tied else self._copy(head))

    def get(self, version: int) -> tuple[Tensor, Tensor]:
        """Embedding and LM head. Raises DrafterError for a version that was not given or is gone."""
        if version not in self._tables:
            known = ", ".join(map(str, self._tables)) or "none"
            raise DrafterError(f"no embedding and LM head of policy version {version} (there are: {known})")
        return self._tables[version]

    def keep(self, versions: Iterable[int]) -> None:
        """Forgets all other versions."""
        wanted = set(versions)
        self._tables = {v: pair for v, pair in self._tables.items() if v in wanted}

    def versions(self) -> list[int]:
        """Those that are held, ascending."""
        return sorted(self._tables)

    def __contains__(self, version: object) -> bool:
        return version in self._tables

    def _copy(self, table: Tensor) -> Tensor:
        return table.detach().to(self._device, self._dtype or table.dtype, copy=True)

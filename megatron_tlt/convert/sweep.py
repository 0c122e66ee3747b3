"""Keeps the memory of a conversion to a few tensors.

torch.save and torch.load leave reference cycles that hold the storages they handled until the garbage collector comes,
and it counts objects, not bytes: on large tensors dozens of them would wait for it.
"""

from __future__ import annotations

import gc

SWEEP_BYTES = 64 << 20


class Sweep:
    """Collects after every `SWEEP_BYTES` of tensors handled."""

    def __init__(self) -> None:
        self._handled = 0

    def handled(self, num_bytes: int) -> None:
        """Notes tensors that are no longer needed, or about to be made."""
        self._handled += num_bytes
        if self._handled > SWEEP_BYTES:
            gc.collect()
            self._handled = 0

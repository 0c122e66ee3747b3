"""Recompute's side effect; and the random states' class, from which megatron-core derives one when it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

CudaRNGStatesTracker = object
# One entry a forward pass that is to be run again; a pass in backward takes the first.
recomputed: list[bool] = []


@contextmanager
def activation_recompute_forward(activation_recompute: bool, recompute_phase: bool) -> Iterator[None]:
    """Around what is recomputed, in forward and again in backward."""
    if activation_recompute:
        recomputed.pop(0) if recompute_phase else recomputed.append(True)
    yield

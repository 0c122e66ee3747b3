"""CUDA graphs of the embedded engine: which forwards are captured at its start, and the memory that they may take.

A forward is padded to B sequences of k rows each (1: plain decoding; more: the last token and its drafts). Captured
are all B up to the running requests, with the k that drafts can have, as far as B * k rows fit the output buffers.

Legend: B sequences, k rows of each, H hidden, F intermediate, V vocabulary, t = rollout.tp; e bytes of an element.

* Buffers that all graphs write: `e*(V + H)` a row, with a drafter of kind eagle3 `e*(V + 4H)`, and the numbers of its
  experts. Temporary memory, shared by all graphs: that of the largest one, of each row what a forward has
  (`engine.row_bytes`), on several ranks its logits a second and a third time; or a block drafter's step.
* The driver's memory for a graph's nodes is measured at each capture. Forwards for which the budget
  (`rollout.graph_memory_mib`) has no room run without a graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.engine import draft_bytes, row_bytes
from megatron_tlt.config.planning.parameters import MIB, element_bytes, routed_experts_bytes
from megatron_tlt.config.root import Config

_SMALL = (1, 2, 4, 8)  # the first batch buckets; behind them come multiples of the stride,
_STRIDE = 8  # then of larger powers of two
ROWS_EACH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, then steps of a quarter of the power of two below, up to `largest` itself."""
    buckets = [b for b in _SMALL if b < largest]
    at = _SMALL[-1]
    while (at := at + max(_STRIDE, 1 << (at.bit_length() - 3))) < largest:
        buckets.append(at)
    return [*buckets, largest]


def round_up(buckets: Sequence[int], value: int) -> int | None:
    """The smallest of the ascending `buckets` that is at least `value`; None if there is none."""
    at = bisect_left(buckets, value)
    return buckets[at] if at < len(buckets) else None


def captured_shapes(max_batch: int, max_rows: int, rows_each: int) -> list[tuple[int, int]]:
    """Pairs (B, k) in the order of their capture: the largest, which makes the shared memory, then by ascending rows.

    `rows_each`: most rows that a request has. So what a budget leaves out are large forwards, where launches cost
    least.
    """
    most = round_up(ROWS_EACH, rows_each) or ROWS_EACH[-1]
    pairs = [(b, k) for b in batch_buckets(max_batch) for k in ROWS_EACH if k <= most and b * k <= max_rows]
    pairs.sort(key=lambda pair: (pair[0] * pair[1], pair))
    return [pairs[-1], *pairs[:-1]]


def has_graphs(config: Config, device: Device) -> bool:
    """Whether the engine captures its steps."""
    rollout = config.rollout
    return (
        rollout.backend == "embedded"
        and device == "cuda"
        and rollout.graph_memory_mib > 0
        and rollout.kernels == "auto"
    )


def graph_bytes(config: Config, device: Device) -> int:
    """The budget, from the start of the engine on: graphs keep their addresses when its cache is released."""
    return config.rollout.graph_memory_mib * MIB * has_graphs(config, device)


def least_graph_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """Output buffers and shared temporary memory: without room for them no large forward is captured."""
    rollout, element = config.rollout, element_bytes(config.rollout.dtype)
    gathered = 2 * shape.vocab_size * element if rollout.tp > 1 else 0
    buffers = shape.vocab_size + config.rollout.speculation.state_parts * shape.hidden_size
    rows, buffer = graph_rows(config), buffers * element + routed_experts_bytes(shape)
    return rows * buffer + max(rows * (gathered + row_bytes(config, shape)), draft_bytes(config, shape))


def graph_rows(config: Config) -> int:
    """Rows of the output buffers: plain decoding and verifying of all running requests."""
    return max(config.rollout.max_running_requests, config.rollout.verify_rows)

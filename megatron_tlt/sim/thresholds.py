"""Settings that a simulation recommends, each with its reason. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from megatron_tlt.sim.result import Point, Threshold

_PAYS = 1.03  # times as fast as plain decoding, to be worth a mention


def recommend(points: Sequence[Point]) -> list[Threshold]:
    """From the last point that speculates (the largest number of nodes); none if no point does."""
    speculating = [p for p in points if p.mode != "off"]
    if not speculating:
        return []
    point = speculating[-1]
    return [_largest(point), *_nodes(points)]


def _largest(point: Point) -> Threshold:
    """Up to how many running requests of a replica drafts pay."""
    pays = list(
        takewhile(lambda s: s.tokens_per_second > _PAYS * s.plain_tokens_per_second, point.strategies)
    )
    name = "running requests of a replica up to which drafts pay"
    if not pays:
        return Threshold(name, "none", "plain decoding is as fast from one request on")
    best = max(point.strategies, key=lambda s: s.tokens_per_second / s.plain_tokens_per_second)
    gain = best.tokens_per_second / best.plain_tokens_per_second
    last, most = pays[-1].running, point.strategies[-1].running
    more = " or more" if last == most else ""
    return Threshold(name, f"{last}{more}", f"{gain:.2f} times as fast at {best.running}")


def _nodes(points: Sequence[Point]) -> list[Threshold]:
    """From which number of nodes on the gain grows no more."""
    steps = {p.nodes: p.seconds for p in points if p.mode == "tlt"}
    if len(steps) < 2:
        return []
    nodes = sorted(steps)
    useful, reason = nodes[0], "the largest simulated: each step up to it still paid"
    for low, high in pairwise(nodes):
        if steps[low] / steps[high] < 1 + 0.5 * (high / low - 1):
            reason = "beyond it a doubling of the nodes brings less than half of what it costs"
            break
        useful = high
    return [Threshold("nodes", str(useful), reason)]

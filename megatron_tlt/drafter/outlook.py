"""What more training time, or more responses, would bring a drafter: from its held-out measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FITTED = 3  # measurements that a fit needs at least


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    """A held-out measurement after `step` optimizer steps, which took `seconds` in all."""

    step: int
    seconds: float
    accepted_length: float


def outlook(points: Sequence[HeldOutPoint], epochs: float, on_trained: float, on_held_out: float) -> str:
    """A table of `points`, and estimates from them.

    `epochs`: how often each response was trained on. `on_trained`, `on_held_out`: 1 - TV of the first drafted position
    on responses that were trained on and on held-out ones.
    """
    lines = ["held-out accepted length over time", "   steps   seconds  accepted"]
    lines += [f"{p.step:8d}  {p.seconds:8.1f}  {p.accepted_length:8.2f}" for p in points]
    lines.append(f"more time: {_more_time(points)}")
    lines.append(
        f"more data: trained on {on_trained:.3f}, held out {on_held_out:.3f} (1 - TV of the first position) after "
        f"{epochs:.1f} epochs; further responses can close that gap at most"
    )
    return "\n".join(lines)


def doubled_gain(points: Sequence[HeldOutPoint]) -> float | None:
    """Accepted length that twice the seconds would add, by a least-squares line over their logarithm; None where there
    are too few measurements.
    """
    if len(points) < _FITTED:
        return None
    slope, _ = np.polyfit(np.log2([p.seconds for p in points]), [p.accepted_length for p in points], 1)
    return float(slope)


def _more_time(points: Sequence[HeldOutPoint]) -> str:
    if len(points) < 2:
        return "no estimate from one measurement (drafter.eval_every)"
    before, last = points[-2:]
    minutes = max(last.seconds - before.seconds, 1e-9) / 60
    slope = (last.accepted_length - before.accepted_length) / minutes
    text = f"{slope:+.2f} a minute in the last interval"
    if (gain := doubled_gain(points)) is not None:
        text += f"; {gain:+.2f} if num_steps is doubled (a line over the logarithm of all {len(points)} measurements)"
    return text

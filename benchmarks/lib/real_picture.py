"""The picture of `real.py`: held-out accuracy over minutes of training, TLT on and off; accepted lengths of drafters.

Minutes are those of steps, without evaluations and checkpoints: the mean seconds of a turn's timed steps, times its
steps. The run with TLT off is not evaluated: where its weights are those of TLT on, bit for bit, so is its accuracy; it
is drawn as far as it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.on_off import whole
from lib.proof_picture import LEFT, RIGHT, WIDTH, rect, svg, text_at

from megatron_tlt.observe import colours

HEIGHT, TOP, BAR = 210, 56, 26  # of the plot, above it, and of a drafter's line; pixels
COLOURS = {"off": colours.MUTED, "on": colours.ORANGE}
BARS = {  # figure -> (words, colour)
    "accept_first": ("first drafter, cold-started policy", colours.GREY),
    "accept_frozen": ("first drafter, final policy", colours.MUTED),
    "accept_last": ("drafter trained in idle time, final policy", colours.ORANGE),
}


def draw(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float]) -> str:
    """The SVG. `rows`: of identical jobs of part grpo, in order; `figures`: the summary's, accepted lengths if there
    are any.
    """
    jobs = {mode: [row for row in rows if row["mode"] == mode] for mode in COLOURS}
    minutes = {mode: _minutes(of_mode) for mode, of_mode in jobs.items()}
    found = {step: (value, error) for step, value, error in jobs["on"][-1]["evaluations"]}
    longest = max(end for times in minutes.values() for end in times.values())
    highest = max(0.1, *(value + error for value, error in found.values())) * 1.05
    scale = (WIDTH - LEFT - RIGHT) / longest
    bottom = TOP + HEIGHT

    def place(minute: float, value: float) -> tuple[float, float]:
        return LEFT + minute * scale, bottom - HEIGHT * value / highest

    headline = f"Held-out accuracy over {max(found):.0f} steps"
    if "accuracy_after" in figures:
        rise = f"{figures['accuracy_before']:.3f} to {figures['accuracy_after']:.3f}"
        headline += f": {rise} ({figures['accuracy_errors']:.1f} standard errors; on more prompts than the curve)"
    body = [text_at(LEFT, 18, headline, weight="bold")]
    saved = f"TLT off beside it for {jobs['off'][-1]['last_step']} steps: the same bits, steps {figures['e2e']:.2f}x"
    body.append(text_at(LEFT, 36, saved, colours.MUTED))
    for mode, times in minutes.items():
        points = [(place(times[step], found[step][0]), found[step][1]) for step in sorted(times) if step in found]
        body += _curve(points, f"TLT {mode}", COLOURS[mode], HEIGHT / highest if mode == "on" else 0.0)
    body += _axes(bottom, longest, scale, highest)
    y = bottom + 62
    known = {name: bar for name, bar in BARS.items() if name in figures}
    if known:
        body.append(text_at(LEFT, y - 10, "tokens of a request in a verifying step, held-out prompts", colours.MUTED))
        each = (WIDTH - LEFT - RIGHT) / 2 / max(figures[name] for name in known)
    for name, (words, colour) in known.items():
        body += [rect(LEFT, y, figures[name] * each, BAR - 8, colour)]
        body.append(text_at(LEFT + figures[name] * each + 6, y + 13, f"{figures[name]:.2f}  {words}"))
        y += BAR
    return svg(body, y + 6)


def _minutes(jobs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Minutes of training at the end of each turn, by step; 0 at step 0."""
    times, now, before = {0: 0.0}, 0.0, 0
    for job in jobs:
        now += whole(dict(job)) * (job["last_step"] - before) / 60
        before = job["last_step"]
        times[before] = now
    return times


def _curve(points: Sequence[tuple[tuple[float, float], float]], name: str, colour: str, per_error: float) -> list[str]:
    """A line with its name at the end; `per_error`: pixels of accuracy 1, for bars of a standard error."""
    path = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _ in points)
    parts = [f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>']
    for (x, y), error in points:
        up = error * per_error
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - up:.1f}" y2="{y + up:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    (x, y), _ = points[-1]
    is_first = not per_error  # below its point, where it does not meet the other's
    return [*parts, text_at(x - 4, y + 22 if is_first else y - 16, name, colour, anchor="middle")]


def _axes(bottom: float, minutes: float, scale: float, highest: float) -> list[str]:
    """Minutes below, accuracy to the left."""
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100) if minutes / size <= 12)
    parts = [rect(LEFT, bottom, WIDTH - LEFT - RIGHT, 1, colours.MUTED)]
    for tick in range(int(minutes / every) + 1):
        parts.append(text_at(LEFT + tick * every * scale, bottom + 16, f"{tick * every}", colours.MUTED, "middle"))
    for tenth in range(int(highest * 10) + 1):
        y = bottom - HEIGHT * tenth / 10 / highest
        parts.append(text_at(LEFT - 8, y + 4, f"{tenth / 10:.1f}", colours.MUTED, "end"))
    return [*parts, text_at(WIDTH - RIGHT, bottom + 32, "minutes of training", colours.MUTED, "end")]

"""The picture of `proof.py`: step bars by phase, lanes of ranks, running requests; TLT off, the drafter alone, TLT on.

All on one axis of seconds: bars are means over steps and jobs; lanes and curves are of one step, the one with the
longest rollout without TLT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_tlt.observe import colours
from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.observe.report_charts import PHASE_COLOURS
from megatron_tlt.observe.runfiles import read_run

WIDTH, LEFT, RIGHT = 860, 108, 56  # pixels
TITLES = {"off": "TLT off", "drafter": "drafter only", "on": "TLT on"}

STATES = {"TRAINING": colours.AMBER, "PRE_ROLLING": colours.CYAN}  # of idle time, by colour


def draw(runs: Mapping[str, Path], seconds: Mapping[str, Mapping[str, float]], figures: Mapping[str, float]) -> str:
    """The SVG. `runs`: run directories by mode, "off" among them; `seconds`: their mean seconds of a step by phase."""
    rows = {mode: read_run(folder).steps[1:] for mode, folder in runs.items()}
    step = max(rows["off"], key=lambda row: row["time/rollout"] + row["time/idle"])["step"] - 1
    lanes = {mode: _lanes(folder, step) for mode, folder in runs.items()}
    ends = [end for of_mode in lanes.values() for lane, _ in of_mode for _, end, _ in lane]
    scale = (WIDTH - LEFT - RIGHT) / max(*ends, *(sum(of.values()) for of in seconds.values()))
    body = [text_at(LEFT, 18, _headline(figures), weight="bold"), *_legend(seconds, 36)]
    y = 52
    for mode in runs:
        body += _bar(TITLES[mode], seconds[mode], y, scale)
        y += 30
    body.append(text_at(LEFT, y + 14, f"one step, by rank (step {step + 1})", colours.MUTED))
    y += 22
    for mode in runs:
        for rank, (lane, _) in enumerate(lanes[mode]):
            body.append(text_at(LEFT - 8, y + 12, f"{mode}, rank {rank}", anchor="end"))
            body += [rect(LEFT + a * scale, y, (b - a) * scale, 16, colour) for a, b, colour in lane]
            y += 20
        y += 4
    body.append(text_at(LEFT, y + 14, "running requests, all ranks", colours.MUTED))
    y += 20
    body += _curves({mode: [curve for _, curve in lanes[mode]] for mode in runs}, y, 70, scale)
    y += 74
    body += _axis(y, (WIDTH - LEFT - RIGHT) / scale, scale)
    return svg(body, y + 34)


def svg(body: Sequence[str], height: float) -> str:
    """A picture of `WIDTH` on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _headline(figures: Mapping[str, float]) -> str:
    same = "same responses, rewards and weights" if figures["identical"] else "RESPONSES DIFFER"
    return f"Rollout {figures['rollout']:.2f}x, step {figures['e2e']:.2f}x; {same}"


def _colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, colours.RED)


def _lanes(folder: Path, step: int) -> list[tuple[list[tuple[float, float, str]], list[tuple[float, float]]]]:
    """For each rank: (start, end, colour) of its phases in seconds of the step, and its running requests by time."""
    run = read_run(folder)
    events = {rank: run.events_of_steps(rank, [step]).get(step, []) for rank in run.ranks}
    begin = min(e["ts"] for of in events.values() for e in of if e["name"] == "rollout" and e["kind"] == "span")
    found = []
    for of_rank in events.values():
        spans = [e for e in of_rank if e["kind"] == "span" and e["name"] in PHASE_COLOURS and e["ts"] >= begin - 0.5]
        used = [e for e in of_rank if e["kind"] == "state" and e["name"] in STATES]
        lane = [_interval(e, begin, _colour(e["name"])) for e in spans]
        lane += [_interval(e, begin, STATES[e["name"]]) for e in used]
        curve = [
            (max(0.0, e["attrs"]["start"] + at / 1e3 - begin), running)
            for e in of_rank
            if e["name"] == "curve"
            for at, running in e["attrs"]["running"]
        ]
        found.append((lane, curve))
    return found


def _interval(event: JsonRow, begin: float, colour: str) -> tuple[float, float, str]:
    start = max(0.0, event["ts"] - begin)
    return start, start + event["dur"], colour


def _bar(title: str, seconds: Mapping[str, float], y: float, scale: float) -> list[str]:
    """A stacked bar of a step, rollout first."""
    parts, x = [text_at(LEFT - 8, y + 16, title, anchor="end")], float(LEFT)
    for phase in sorted(seconds, key=lambda name: [*PHASE_COLOURS, name].index(name)):
        width = seconds[phase] * scale
        parts.append(rect(x, y, width, 22, _colour(phase)))
        if width > 60:
            parts.append(
                text_at(x + 5, y + 15, f"{phase} {seconds[phase]:.1f} s", "#ffffff" if phase != "idle" else colours.INK)
            )
        x += width
    return [*parts, text_at(x + 5, y + 15, f"{sum(seconds.values()):.1f} s", weight="bold")]


def _legend(seconds: Mapping[str, Mapping[str, float]], y: float) -> list[str]:
    longest = {name: max(of.get(name, 0.0) for of in seconds.values()) for of in seconds.values() for name in of}
    total = max(sum(of.values()) for of in seconds.values())
    names = [name for name in PHASE_COLOURS if longest.get(name, 0.0) > 0.01 * total]
    entries = [(name, _colour(name)) for name in names if name != "merge"]
    entries += [("training and merging drafters", colours.AMBER), ("pre-rollouts", colours.CYAN)]
    parts, x = [], float(LEFT)
    for name, colour in entries:
        parts += [rect(x, y - 9, 10, 10, colour), text_at(x + 14, y, name, colours.MUTED)]
        x += 28 + 7 * len(name)
    return parts


def _curves(curves: Mapping[str, list[list[tuple[float, float]]]], y: float, height: float, scale: float) -> list[str]:
    """Running requests as steps: the sum of the ranks; off grey, on coloured."""
    sums = {mode: _summed(of_ranks) for mode, of_ranks in curves.items()}
    most = max(running for points in sums.values() for _, running in points)
    parts = []
    for mode, points in sums.items():
        path, before = [], 0.0
        for at, running in points:
            x = LEFT + at * scale
            path += [f"{x:.1f},{y + height * (1 - level / most):.1f}" for level in (before, running)]
            before = running
        colour = {"off": colours.MUTED, "drafter": colours.AMBER}.get(mode, colours.ORANGE)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(path)}"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{y + height - 6}" fill="{colour}">{mode}</text>')
    ends = {f"{most:.0f}": y + 8, "0": y + height}
    return [*parts, *(text_at(LEFT - 8, at, words, anchor="end") for words, at in ends.items())]


def _summed(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Sum of step curves, at every time at which one changes."""
    times = sorted({at for curve in ranks for at, _ in curve})
    return [(at, sum(next((r for t, r in reversed(curve) if t <= at), 0.0) for curve in ranks)) for at in times]


def _axis(y: float, seconds: float, scale: float) -> list[str]:
    every = next(size for size in (0.5, 1, 2, 5, 10, 20, 50) if seconds / size <= 12)
    parts = []
    for tick in range(int(seconds / every) + 1):
        x = LEFT + tick * every * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="{colours.MUTED}"/>')
        parts.append(text_at(x, y + 18, f"{tick * every:g}", colours.MUTED, anchor="middle"))
    return [*parts, text_at(WIDTH - RIGHT, y + 30, "seconds", colours.MUTED, anchor="end")]


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(0.3, width):.1f}" height="{height}" fill="{colour}"/>'


def text_at(
    x: float, y: float, words: str, colour: str = colours.INK, anchor: str = "start", weight: str = "normal"
) -> str:
    where = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {where} fill="{colour}">{words}</text>'

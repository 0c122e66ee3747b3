"""A chart of lines as SVG, 640 x 340, for the pictures of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points of ascending x, joined; `dots` are shown beside them. Lines of one name have one colour."""

    name: str
    colour: str
    points: Sequence[Point]
    dots: Sequence[Point] = ()
    dashed: bool = False


def line_chart(lines: Sequence[Line], x_ticks: Mapping[float, str], caption: str) -> str:
    """Both axes are linear; y begins at 0 and has a tick at each whole number, x a text at each of `x_ticks`."""
    seen = [point for line in lines for point in (*line.points, *line.dots)]
    low, high = min(x for x, _ in seen), max(x for x, _ in seen)
    top = 1.05 * max(y for _, y in seen)

    def place(point: Point) -> Point:
        return 50 + 560 * (point[0] - low) / ((high - low) or 1), 290 - 250 * point[1] / top

    parts = []
    for tick in range(int(top) + 1):
        y = place((low, tick))[1]
        parts.append(f'<line x1="50" x2="610" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for x, text in x_ticks.items():
        parts.append(f'<text x="{place((x, 0))[0]:.1f}" y="308" text-anchor="middle">{text}</text>')
    for line in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line.points))
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline fill="none" stroke="{line.colour}" stroke-width="2"{dashes} points="{path}"/>')
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in map(place, line.dots)]
        parts += dots
    for number, (name, colour) in enumerate({line.name: line.colour for line in lines}.items()):
        parts.append(f'<text x="{110 + 120 * number}" y="20" text-anchor="middle" fill="{colour}">{name}</text>')
    parts.append(f'<text x="330" y="330" text-anchor="middle">{caption}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="340" font-family="sans-serif" font-size="12">\n'
        '<rect width="640" height="340" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )

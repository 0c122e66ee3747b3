"""`megatron-tlt report A B`: two runs side by side. Same answers? How much faster, and where? Torch-free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.observe.page import Chart, Page, Part, Section, Table, Tile, Trace
from megatron_tlt.observe.report import mean, seconds_text, state_of, subtitle
from megatron_tlt.observe.report_charts import PHASES, line, phases_of
from megatron_tlt.observe.runfiles import Row, RunData, read_run

_CURVES = (
    ("Learning", "Reward", "reward/mean", "mean over answers"),
    ("Learning", "Accuracy of the rollouts", "reward/accuracy", "share of answers"),
    ("Learning", "Response length", "length/mean", "tokens"),
    ("Time", "Step time", "time/step", "seconds"),
    ("Time", "Rollout speed", "engine/tokens_per_s", "tokens/s, all ranks"),
    ("Rollouts", "Accepted length", "spec/accept_length", "tokens"),
    ("Rollouts", "Idle seconds", "idle/seconds", "seconds, sum of the ranks"),
    ("Rollouts", "Recovered seconds", "idle/recovered_seconds", "seconds, sum of the ranks"),
    ("Rollouts", "Requests stolen", "idle/stolen_requests", "requests"),
)
_CLOSE = 0.02  # step times within it are called equal
_BUSY = 1.25  # times as long for the same update: the machine did something else, too
_SHORTEST = 1e-3  # seconds a step of a phase that a ratio says something of
_LONGEST = 90  # characters of a setting


@dataclass
class Equality:
    """What the digests of two runs say, of the steps that both have made."""

    steps: int
    """Steps compared."""
    answers: int | None
    """The first step whose answers differ; None: no step's do."""
    rewards: int | None
    """The same of rewards."""

    @property
    def are_same(self) -> bool:
        """Whether everything compared is equal."""
        return self.steps > 0 and self.answers is None and self.rewards is None

    def sentence(self) -> str:
        """For the verdict."""
        if not self.steps:
            return (
                "The runs share no step with a digest, so it is not known whether their answers are the same."
            )
        if self.are_same:
            steps = f"all {self.steps} common steps" if self.steps > 1 else "the common step"
            return f"Same answers and rewards in {steps}."
        if self.answers is None:
            return f"Same answers in all {self.steps} common steps, but other rewards from step {self.rewards} on."
        return (
            f"Not the same answers: they differ from step {self.answers} on (of {self.steps} common steps)."
        )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def equality(a: Sequence[Row], b: Sequence[Row]) -> Equality:
    """Compares rows of rollouts.jsonl."""
    first = {row["step"]: row for row in a}
    pairs = [(first[row["step"]], row) for row in b if row["step"] in first]

    def differs(name: str) -> int | None:
        return min((one["step"] for one, two in pairs if one.get(name) != two.get(name)), default=None)

    return Equality(len(pairs), differs("answers"), differs("rewards"))


def common(a: RunData, b: RunData) -> tuple[RunData, RunData]:
    """Both runs cut to the steps that both have made: or the longer one would look slower."""
    shared = {row["step"] for row in a.steps} & {row["step"] for row in b.steps}
    one, two = (
        RunData(
            r.run_dir,
            r.config,
            [s for s in r.steps if s["step"] in shared],
            r.evals,
            r.rollouts,
            ranks=r.ranks,
        )
        for r in (a, b)
    )
    return one, two


def names_of(a: RunData, b: RunData) -> tuple[str, str]:
    """Short names that differ."""
    if a.name != b.name:
        return a.name, b.name
    return str(a.run_dir), str(b.run_dir)


def phase_rows(a: RunData, b: RunData) -> list[tuple[str, float, float]]:
    """(phase, seconds a step in A, in B), the largest difference first; both of the same steps."""
    first, second = phases_of(a), phases_of(b)
    steps = max(1, len(a.steps))
    rows = []
    for name in [*first, *(n for n in second if n not in first)]:
        sums = [sum(of[name][1]) / steps if name in of else 0.0 for of in (first, second)]
        rows.append((name, sums[0], sums[1]))
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))


def verdict(a: RunData, b: RunData, same: Equality, names: tuple[str, str]) -> str:
    """Same answers? How much faster, where? `a` and `b` cut to common steps."""
    text = same.sentence()
    times = [mean(run.column("time/step")[1]) for run in (a, b)]
    if not all(times):
        return f"{text} Nothing is known of their speed: they share no step."
    each = f"{seconds_text(times[0])} against {seconds_text(times[1])} a step"
    ratio = times[0] / times[1]
    if abs(ratio - 1) <= _CLOSE:
        return f"{text} They are equally fast: {each}."
    faster, factor = (names[1], ratio) if ratio > 1 else (names[0], 1 / ratio)
    sign = 1 if ratio > 1 else -1
    gains = [(name, x, y) for name, x, y in phase_rows(a, b) if sign * (x - y) > 0]
    where = ""
    if gains:
        name, x, y = max(gains, key=lambda row: abs(row[1] - row[2]))
        where = f", most of it in {name}: {seconds_text(x)} against {seconds_text(y)}"
    return f"{text} {faster} is {factor:.2f}× as fast ({each}{where}).{_caution(a, b, same)}"


def _caution(a: RunData, b: RunData, same: Equality) -> str:
    """A sentence where times do not compare: the same update, of the same answers on as many ranks, took longer."""
    updates = [mean(run.column("time/update")[1]) for run in (a, b)]
    is_same_work = (
        same.are_same and len(a.ranks) == len(b.ranks) and a.config.get("actor") == b.config.get("actor")
    )
    if not is_same_work or not all(updates) or max(updates) < _BUSY * min(updates):
        return ""
    return (
        f" But the update, the same work in both, took {max(updates) / min(updates):.2f}× as long in one of them: the "
        "machines were not equally fast or not equally busy, so these times say little."
    )


def compare_page(first: str | Path, second: str | Path) -> Page:
    """The report of two runs. Raises ConfigError where there is none."""
    whole = read_run(first), read_run(second)
    same = equality(whole[0].rollouts, whole[1].rollouts)
    names = names_of(*whole)
    a, b = common(*whole)
    page = Page(f"{names[0]} against {names[1]}", f"A: {subtitle(whole[0])} — B: {subtitle(whole[1])}")
    page.verdict = verdict(a, b, same, names)
    page.tone = "good" if same.are_same else "" if not same.steps else "bad"
    page.tiles = _tiles(a, b, same)
    page.sections = [
        _settings(*whole, names),
        _learning(whole, names),
        _time(a, b, names),
        _rollouts(whole, names),
    ]
    page.footer = f"written {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by megatron-tlt report"
    return page


def _tiles(a: RunData, b: RunData, same: Equality) -> list[Tile]:
    answers = "not known" if not same.steps else "the same" if same.answers is None else "different"
    note = f"{same.steps} common step{_s(same.steps)}"
    if same.answers is not None:
        note = f"from step {same.answers} on"
    tiles = [Tile("answers", answers, note)]
    for label, name, is_rate in (
        ("step time", "time/step", False),
        ("rollout time", "time/rollout", False),
        ("tokens/s", "engine/tokens_per_s", True),
        ("accepted length", "spec/accept_length", True),
    ):
        x, y = mean(a.column(name)[1]), mean(b.column(name)[1])
        if x and y:
            texts = [f"{value:,.4g}" if is_rate else seconds_text(value) for value in (x, y)]
            tiles.append(Tile(label, f"{y / x if is_rate else x / y:.2f}×", " → ".join(texts)))
    return tiles


def _settings(a: RunData, b: RunData, names: tuple[str, str]) -> Section:
    one, two = _flat(a.config), _flat(b.config)
    # Of a section that one run does not have at all, only that.
    sections = {
        path
        for flat, other in ((one, two), (two, one))
        for path, value in flat.items()
        if value is None and any(name.startswith(f"{path}.") for name in other)
    }
    paths = {path for path in {*one, *two} if one.get(path) != two.get(path) and path != "train.run_dir"}
    inner = {path for path in paths if any(path.startswith(f"{section}.") for section in sections)}
    shown = sorted(paths - inner | sections)
    rows = [(path, *(_value(flat, path) for flat in (one, two))) for path in shown]
    rows.append(("state", state_of(a), state_of(b)))
    return Section("What differs in the settings", [Table(["field", *names], rows, wide=True)])


def _value(flat: dict[str, object], path: str) -> str:
    if flat.get(path) is None:
        return "given" if any(other.startswith(f"{path}.") for other in flat) else "none"
    text = str(flat[path])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _flat(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}".lstrip(".")).items()}


def _pairs(runs: tuple[RunData, RunData], names: tuple[str, str], section: str) -> list[Part]:
    parts: list[Part] = []
    for where, title, metric, unit in _CURVES:
        if where != section:
            continue
        lines = [
            line(name, *run.column(metric), colour, **_style(at))
            for at, (run, name, colour) in enumerate(zip(runs, names, ("@3", "@2"), strict=True))
            if run.column(metric)[0]
        ]
        if lines:
            parts.append(Chart(title, lines, "step", unit))
    return parts


def _style(index: int) -> Trace:
    """The second run's lines are thinner and lie above the first's: both are seen where they are equal."""
    return (
        {"line": {"color": "@2", "width": 1.6, "dash": "dot"}}
        if index
        else {"line": {"color": "@3", "width": 3.5}}
    )


def _learning(runs: tuple[RunData, RunData], names: tuple[str, str]) -> Section:
    parts = _pairs(runs, names, "Learning")
    lines = []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows = [row for row in run.evals if row.get("eval/pass@1") is not None]
        if rows:
            trace = line(
                name, [r["step"] for r in rows], [r["eval/pass@1"] for r in rows], "@3", **_style(at)
            )
            lines.append(trace | {"mode": "lines+markers", "marker": {"color": "@2" if at else "@3"}})
    if lines:
        parts.append(Chart("Held-out accuracy", lines, "steps done", "pass@1"))
    return Section("Learning", parts, "Equal answers give equal curves: then one line covers the other.")


def _time(a: RunData, b: RunData, names: tuple[str, str]) -> Section:
    rows = phase_rows(a, b)
    if not a.steps:
        return Section("Time")
    bars = []
    for name in sorted(
        {name for name, _, _ in rows}, key=lambda n: list(PHASES).index(n) if n in PHASES else 99
    ):
        x, y = next((x, y) for phase, x, y in rows if phase == name)
        bar = {"type": "bar", "orientation": "h", "name": name, "y": list(names), "x": [x, y]}
        bars.append(bar | {"marker": {"color": PHASES.get(name, "@6")}, "hovertemplate": "%{x:.3f} s"})
    layout = {"barmode": "stack", "hovermode": "closest", "bargap": 0.35}
    layout |= {"yaxis": {"autorange": "reversed", "type": "category"}, "legend": {"traceorder": "normal"}}
    table = [(name, x, y, y - x, f"{x / y:.2f}×" if min(x, y) > _SHORTEST else "") for name, x, y in rows]
    total = [mean(run.column("time/step")[1]) for run in (a, b)]
    if all(total):
        table.append(("whole step", total[0], total[1], total[1] - total[0], f"{total[0] / total[1]:.2f}×"))
    parts: list[Part] = [
        Chart(
            "Seconds a step, by phase",
            bars,
            "seconds, mean of the ranks",
            layout=layout,
            wide=True,
            height=230,
        ),
        Table(
            ["phase", *names, "B − A", "A / B"], table, "Seconds a step, largest difference first", wide=True
        ),
    ]
    return Section(
        "Time", [*parts, *_pairs((a, b), names, "Time")], f"The {len(a.steps)} steps that both have made."
    )


def _rollouts(runs: tuple[RunData, RunData], names: tuple[str, str]) -> Section:
    parts = _pairs(runs, names, "Rollouts")
    lines = []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        rows = [row for row in run.rollouts if row.get("drafted_at")]
        drafted, accepted = [0] * 32, [0] * 32
        for row in rows:
            for total, key in ((drafted, "drafted_at"), (accepted, "accepted_at")):
                for position, count in enumerate(row[key][:32]):
                    total[position] += count
        shares = [x / y for x, y in zip(accepted, drafted, strict=True) if y]
        if shares:
            lines.append(line(name, list(range(1, len(shares) + 1)), shares, "@3", **_style(at)))
    if lines:
        layout = {"yaxis": {"tickformat": ".0%", "range": [0, 1]}}
        parts.append(
            Chart("Accepted by draft position", lines, "draft position", "share of drafts", layout=layout)
        )
    return Section("Rollouts", parts)

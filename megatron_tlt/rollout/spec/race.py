"""Which of a few ways to decode is fastest: each is played for spans of steps now and then, the best one always else.

    span of the best arm -> is another arm's trial due? --no--> another span of the best arm
            ^                        | yes
            +--- its bill: when it is due again <--- span of that arm

What a trial loses is its bill. An arm is due again when the time since would lose `_BUDGET` of itself by such trials:
an arm that loses much is tried seldom, one that loses nothing often. First trials are let come sooner.

All amounts are in plain steps: a step is worth `emitted / running` of them, and costs its seconds over those of a
plain step of as many requests. So steps of different batch sizes, and of a slower and a faster hour, can be added up.
No clock, no torch. Source of the comparison by whole spans: measured, docs/log.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low

PLAIN = 0  # index of the arm that is plain decoding
Predict = Callable[
    [int, float], float
]  # (arm, drafted nodes fed a request) -> plain steps that its step costs, about

_BUDGET = 0.01  # of the time may be lost to trials of all arms together
_EAGER = 4.0  # times the budget for the first trial of an arm that may yet be the best, half of it for the next ...
_UNSURE = 0.85  # ... which are those whose gain is this share of the best one's at least
_LEAD = 1.02  # an arm must be faster by so much to take over
_COLD = 2  # steps after a change of arms that tell of the change: drafters catch up, caches fill
_COLD_PLAIN = 12  # and of plain ones: what drafts have put out of the caches comes back slowly (docs/log.md)
_SETTLE = 64.0  # plain steps of time until caches are as an arm leaves them, if it may be the best
_TRIAL = (6, 24)  # steps of a trial, and request-steps, at least
_CLOSE, _LONG = 0.9, 4  # arms within this share of the best lose little: longer trials for them
_HOPELESS = 0.6  # share of the best's gain below which a trial is broken off
_OUTLIER = (
    2.0  # a step takes at most so many times what it should, by its span's median: the rest was others' doing
)
_BURST = (
    1.25  # and a span so many times what the arm's usually do: beyond, a neighbour was busy (docs/log.md)
)
_TICK = 1e-9  # of a pace: a clock may not have moved
_DEAR = 32.0  # plain steps that a change of arms is billed with at most
_MEMORY = 1024, 256  # request-steps, and steps, that a mean fades over (see `_ALIKE`)
_FADE = 0.8  # of an arm's mean is kept at a trial, at most
_CHANGED = 1.25  # a span that is so far off the mean is left out; two in a row make half of it forgotten
_GUESS = 0.9  # of a guessed gain is believed when the best arm is chosen
_PRIOR = 8.0  # plain steps that a neighbouring regime's experience weighs
_REST = 128  # plain steps at most that nobody plans
_ALIKE = 16  # steps that a span of more plain ones counts for when means fade


@dataclass(slots=True)
class Arm:
    """What one way of decoding gave: `worth` for `spent`, fading sums in plain steps."""

    worth: float = 0.0
    spent: float = 0.0
    steps: float = 0.0
    trials: int = 0
    due: float = 0.0  # the regime's time from which on it may be tried
    fed: float = 1.0  # drafted nodes fed a request, fading mean
    lost: float = 0.0  # by the last trial
    pace: float = 0.0  # what its steps take over what they should; 0 while unknown
    is_doubted: bool = False  # the last span was far off the mean, and left out

    @property
    def gain(self) -> float:
        """Times as fast as plain decoding; infinite while unknown."""
        return self.worth / self.spent if self.spent else float("inf")

    @property
    def sure_gain(self) -> float:
        """`gain`, less what a guess may be off."""
        return self.gain if self.steps else _GUESS * self.gain

    def keep_pace(self, pace: float, keep: float) -> None:
        """The steps of a span took `pace` times what they should. Mutates `pace`, slowly: bursts pass."""
        if self.pace:
            pace = min(max(pace, self.pace / _BURST), self.pace * _BURST)
            self.pace *= (pace / self.pace) ** min(1.0, 4 * (1 - keep))
        else:
            self.pace = pace

    def add(self, worth: float, spent: float, steps: int, keep: float) -> None:
        """One more span of `steps` steps. Mutates the sums."""
        if not self.steps:
            keep = 0.25  # all that is known yet is a guess
        elif self.steps > steps and not 1 / _CHANGED < worth / spent / self.gain < _CHANGED:
            self.is_doubted = not self.is_doubted
            if self.is_doubted:
                return
            keep = min(keep, 0.5)
        self.is_doubted = False
        self.worth = self.worth * keep + worth
        self.spent = self.spent * keep + spent
        self.steps = self.steps * keep + steps


def _cold_steps(arm: int) -> int:
    return _COLD_PLAIN if arm == PLAIN else _COLD


class Race:
    """The arms at about so many running requests. `playing` is the one whose turn it is."""

    def __init__(
        self,
        arms: int,
        key: int = 0,
        others: Mapping[int, Race] | None = None,
        predict: Predict = lambda arm, fed: 1.0,
    ):
        """`arms` >= 1, of which the first is plain decoding. `others`: the races of all regimes, this one's by `key`.

        What this race does not know yet it takes from the nearest one that does: the tokens that a step of an arm
        brings a request hardly depend on how many requests run. What the step costs does, so that is predicted.
        """
        self.arms = [Arm() for _ in range(arms)]
        self.arms[PLAIN].pace = 1.0  # its steps are the unit
        self.time = 0.0  # in plain steps
        self._key, self._others, self._predict = key, {} if others is None else others, predict
        for at in range(arms):
            self._learn(at)
        self.best: int = max(self._known(), key=lambda at: self.arms[at].sure_gain, default=PLAIN)
        for at in range(arms):
            if at not in (PLAIN, self.best) and self.arms[at].spent:
                self._bill(self.arms[at], self.arms[at].lost)
        self._bill_to: Arm | None = None  # whose trial has just ended
        self.playing = PLAIN  # what the rest is measured by comes first
        self._usual: list[float] = []  # of the span's steps that count, and what they took over it
        self._ratios: list[float] = []
        self._worth = self._cold_loss = 0.0
        self._cold, self._settle, self._changes = _cold_steps(PLAIN), 0.0, 0

    def _nearest(self) -> list[Race]:
        """The other races, the nearest regime's first."""
        keys = sorted(self._others, key=lambda key: abs(key - self._key))
        return [self._others[key] for key in keys if key != self._key]

    def _known(self) -> list[int]:
        return [at for at, arm in enumerate(self.arms) if arm.spent]

    def _learn(self, at: int) -> None:
        """What a neighbour knows of an arm that is unknown here, if one does: a little weight."""
        arm = self.arms[at]
        for race in self._nearest():
            other = race.arms[at]
            if other.steps:
                cost = 1.0 if at == PLAIN else self._predict(at, other.fed)
                arm.worth, arm.spent = _PRIOR * other.worth / other.steps / cost, _PRIOR
                arm.fed, arm.lost = other.fed, other.lost
                return

    @property
    def top(self) -> float:
        """The best arm's gain; 1 while unknown."""
        arm = self.arms[self.best]
        return arm.gain if arm.spent else 1.0

    def observe(
        self,
        arm: int,
        running: int,
        worth: float,
        spent: float,
        usual: float,
        fed: float,
        changed: bool,
    ) -> None:
        """A step of `arm` that fed `fed` drafted nodes a request. Mutates the race.

        `usual`: what a step of so many rows takes, about, up to a factor. `changed`: the step before was of another
        kind, perhaps in another regime.
        """
        self.arms[arm].fed += (fed - self.arms[arm].fed) / 16
        self._observe(arm, running, worth, [spent], usual, changed)

    def observe_rest(self, running: int, spent: list[float], changed: bool) -> None:
        """As many plain steps in a row. Mutates the race."""
        self._observe(PLAIN, running, 1.0, spent, 1.0, changed)

    def _observe(
        self, arm: int, running: int, worth: float, spent: list[float], usual: float, changed: bool
    ) -> None:
        """Steps that are alike but for what they took."""
        if arm != self.playing:  # another rank decides
            self._begin(arm)
        if changed and self._changes < 4:  # who changes at every step must be judged by such steps
            self._cold, self._changes = max(self._cold, _cold_steps(arm)), self._changes + 1
        self.time += len(spent) * worth / self.top
        for at, took in enumerate(spent):
            if not self.is_cold:
                spent = spent[at:]
                break
            self._warm_up(arm, worth, took if self._cold else min(took, self._most() * usual))
        else:
            return
        self._worth += len(spent) * worth
        self._usual += [usual] * len(spent)
        self._ratios += [took / usual for took in spent]
        steps = len(self._usual)
        if steps >= self._length(running) or (self.is_trial and self._is_hopeless(steps, running)):
            self._close(steps, running)

    def _warm_up(self, arm: int, worth: float, spent: float) -> None:
        """A step that only tells what the change of arms took. The trial before pays for the way back, too."""
        self._cold, self._settle = max(0, self._cold - 1), self._settle - spent
        self._cold_loss += spent - worth / self.top
        if self._cold_loss > (1 - _HOPELESS) * _SETTLE:
            self._settle = 0.0
        if not self.is_cold and self._bill_to is not None and arm == self.best:
            self._bill(self._bill_to, min(self._cold_loss, _DEAR))
            self._bill_to = None

    def rest(self, running: int) -> int:
        """Plain steps to make after this one before somebody looks: until the span's end or a trial at least."""
        if self.playing != PLAIN:
            return 0
        if self.is_cold:
            return max(self._cold, math.ceil(self._settle)) - 1
        steps = self._length(running) - len(self._usual)
        if not self.is_trial:
            due = min((arm.due for arm in self.arms[1:]), default=math.inf)
            steps = max(steps, int(min(_REST, (due - self.time) * self.top)))
        return steps - 1

    @property
    def is_trial(self) -> bool:
        """Whether it is not the best arm's turn."""
        return self.playing != self.best

    @property
    def is_cold(self) -> bool:
        """Whether the next step only tells of a change of arms."""
        return self._cold > 0 or self._settle > 0

    def _begin(self, arm: int) -> None:
        if arm != self.playing:
            self._cold = _cold_steps(arm)
            self._settle = _SETTLE if self._is_close(arm) else 0.0
        self.playing, self._usual, self._ratios = arm, [], []
        self._worth, self._cold_loss, self._changes = 0.0, 0.0, 0

    def _is_close(self, arm: int) -> bool:
        """Whether an arm that has been played may be so near the best that a change's aftermath could decide."""
        known = self.arms[arm]
        return known.steps > 0 and known.gain >= (_HOPELESS if arm == PLAIN else _UNSURE) * self.top

    def _length(self, running: int) -> int:
        arm = self.arms[self.playing]
        if self.is_trial:
            steps = max(_TRIAL[0], -(-_TRIAL[1] // running))
            return steps * _LONG if arm.trials and arm.gain >= _CLOSE * self.top else steps
        return max(8, 32 // running) if self.playing != PLAIN else 8

    def _is_hopeless(self, steps: int, running: int) -> bool:
        return steps >= 2 and steps * running >= 8 and self._worth < _HOPELESS * self.top * self._paid()

    def _paid(self) -> float:
        """What the span took, without outliers and bursts. Of the whole span: an arm's own steps may well differ."""
        return min(self._pace(), self._most()) * sum(self._usual)

    def _pace(self) -> float:
        """What the span took over what it should, without outliers."""
        most = _OUTLIER * median_low(self._ratios)
        pairs = zip(self._ratios, self._usual, strict=True)
        return sum(min(ratio, most) * usual for ratio, usual in pairs) / sum(self._usual) + _TICK

    def _most(self) -> float:
        """What steps of the playing arm are believed to take at most, over what they should."""
        return _BURST * self.arms[self.playing].pace or math.inf

    def _close(self, steps: int, running: int) -> None:
        arm, spent = self.arms[self.playing], self._paid()
        news = min(steps, _ALIKE) if self.playing == PLAIN and not self.is_trial else steps
        keep = max(0.5, 1.0 - max(news * running / _MEMORY[0], news / _MEMORY[1]))
        arm.keep_pace(self._pace(), min(keep, _FADE) if self.is_trial else keep)
        if self.is_trial:
            arm.trials += 1
            lost = spent - self._worth / self.top
            arm.add(self._worth, spent, steps, min(keep, _FADE))
            self._bill_to = arm
            arm.due = self.time
            arm.lost = max(lost, 0.01 * spent) + min(self._cold_loss, _DEAR)
            self._bill(arm, arm.lost)
        else:
            arm.add(self._worth, spent, steps, keep)
        self._begin(self._next())

    def _bill(self, arm: Arm, lost: float) -> None:
        """Puts `arm` off for what it `lost`."""
        eager = max(1.0, _EAGER / max(1, arm.trials)) if arm.gain >= _UNSURE * self.top else 1.0
        share = _BUDGET * eager / (len(self.arms) - 1)
        arm.due = max(arm.due, self.time) + max(0.0, lost) / share

    def _next(self) -> int:
        """The arm of the next span: one that is due, unknown ones first and then the fastest, or the best."""
        arms = self.arms
        for at, arm in enumerate(arms):
            if not arm.spent:
                self._learn(at)
                if arm.spent:
                    self._bill(arm, arm.lost)  # known elsewhere: there is no haste
        fastest = max(self._known(), key=lambda i: arms[i].sure_gain)
        if arms[fastest].sure_gain > _LEAD * self.top:
            self.best = fastest
        due = [i for i, arm in enumerate(arms) if i != self.best and arm.due <= self.time]
        return max(due, key=lambda i: arms[i].gain, default=self.best)

    def state_dict(self) -> list[float | int | list[float | int]]:
        """Time, best arm, and each arm's numbers."""
        arms: list[list[float | int]] = [
            [a.worth, a.spent, a.steps, a.trials, a.due, a.fed, a.lost, a.pace] for a in self.arms
        ]
        return [self.time, self.best, *arms]

    def load_state_dict(self, state: list[float | int | list[float | int]]) -> None:
        """Takes `state_dict`'s; a new span begins."""
        time, best, *arms = state
        assert isinstance(time, float | int) and isinstance(best, int)
        self.time, self.best = float(time), best
        for at, numbers in enumerate(arms):
            assert isinstance(numbers, list)
            worth, spent, count, trials, due, fed, lost, pace = numbers
            self.arms[at] = Arm(worth, spent, count, int(trials), due, fed, lost, pace)
        self._bill_to = None
        self._begin(self.best)
        self._cold = _cold_steps(best)

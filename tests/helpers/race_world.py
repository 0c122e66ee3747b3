"""Arms with known speeds under a virtual clock, for `rollout.spec.race`. Everything in plain steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class RaceWorld:
    """Steps of arm i are worth tokens of mean `worth[i](time)` and cost `spent[i]`, after a change `cold` more.

    `crowd`: others use the processor's cache. Plain steps warm it, and are up to `1 + crowd` times as long until it
    is warm; drafts, which read it seldom, lose it slowly, and become a tenth of that slower.
    """

    worth: list
    spent: list
    seed: int = 0
    luck: float = 0.5  # deviation of a request's tokens over their mean
    noise: float = 0.05
    outliers: float = 0.0  # share of steps that a neighbour makes 5 to 50 times as long to the reader
    bursts: float = (
        0.0  # share of the time in which neighbours make all steps 2.5 times as long to the reader
    )
    cold: float = 3.0  # plain steps that a change of arms costs
    drift: object = None  # factor on what the reader sees, a function of the clock
    crowd: float = 0.0
    warmth: float = 1.0  # of the cache
    burst_ends: float = 0.0
    clock: float = 0.0
    done: float = 0.0
    last: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)

    def gain(self, arm):
        """True speed of an arm at present."""
        worth = self.worth[arm]
        return (worth(self.clock) if callable(worth) else worth) / self.spent[arm]

    def step(self, race, running=4):
        """One step of the race's arm, or a rest. Returns the arm."""
        arm = race.playing
        mean = self.gain(arm) * self.spent[arm]
        tokens = mean if arm == 0 else mean * max(0.0, self.rng.normal(1.0, self.luck / running**0.5))
        took = self.spent[arm] * self._crowding(arm) + (self.cold if arm != self.last else 0.0)
        rest = race.rest(running)
        race.observe(arm, running, tokens, self._seen(took), self.spent[arm], 1.0, arm != self.last)
        self.clock, self.done, self.last = self.clock + took, self.done + tokens, arm
        if rest:
            self._rest(race, running, rest)
        return arm

    def _rest(self, race, running, steps):
        """Plain steps that are looked at together."""
        seen = []
        for _ in range(steps):
            took = self._crowding(0)
            seen.append(self._seen(took))
            self.clock, self.done = self.clock + took, self.done + self.gain(0)
        race.observe_rest(running, seen, False)

    def _seen(self, took):
        """What the reader's clock says."""
        seen = took * self.rng.lognormal(0.0, self.noise)
        if self.drift is not None:
            seen *= self.drift(self.clock)
        if self.rng.random() < self.outliers:
            seen *= self.rng.uniform(5, 50)
        return seen * self._burst(took) if self.bursts else seen

    def _burst(self, took):
        """2.5 in a burst, which lasts about 30 plain steps; 1 otherwise."""
        going = self.clock < self.burst_ends
        if not going and self.rng.random() < took * self.bursts / 30:
            self.burst_ends = self.clock + self.rng.exponential(30)
        return 2.5 if going else 1.0

    def _crowding(self, arm):
        """How many times as long a step is; moves the cache."""
        factor = 1 + self.crowd * (1 - self.warmth if arm == 0 else -0.1 * self.warmth)
        goal, time = (1.0, 18.0) if arm == 0 else (0.0, 40.0)
        self.warmth += (goal - self.warmth) * (1 - math.exp(-self.spent[arm] * factor / time))
        return factor

    def run(self, race, until, running=4):
        """Until the clock shows so many plain steps more. Returns work done over time."""
        clock, done = self.clock, self.done
        while self.clock < clock + until:
            self.step(race, running)
        return (self.done - done) / (self.clock - clock)

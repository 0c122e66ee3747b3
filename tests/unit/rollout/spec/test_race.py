"""The race of arms in worlds whose true speeds are known: near the best arm in the long run, wherever it is."""

import json
from itertools import pairwise

import pytest

from megatron_tlt.rollout.spec.race import Race
from tests.helpers.race_world import RaceWorld

# Worth and seconds of a step by arm, in plain steps; the first arm is plain decoding.
WORLDS = {
    "loses": ([1, 2, 2.5, 3, 3.2, 1.5, 1.2], [1, 2.5, 4, 5, 8, 2.2, 2]),
    "even": ([1, 2.02, 3, 3, 3.2, 1.5, 1.2], [1, 2, 3, 5, 8, 2.2, 2]),
    "close": ([1, 1.95, 3, 5, 3.2, 1.5, 1.2], [1, 2, 3.06, 5, 3.4, 1.53, 1.22]),
    "wins": ([1, 2.8, 3, 4, 3.2, 1.5, 1.2], [1, 2, 2.2, 2.5, 8, 2.2, 2]),
    "flat": ([1, 2.8, 3, 4, 3.2, 1.5, 1.2], [1, 1.2, 1.2, 1.3, 1.4, 1.2, 1.2]),
}


@pytest.mark.parametrize("outliers", [0.0, 0.05], ids=["calm", "outliers"])
@pytest.mark.parametrize("running", [1, 4, 32])
@pytest.mark.parametrize("name", WORLDS)
def test_within_three_percent_of_the_best_arm(name, running, outliers):
    worth, spent = WORLDS[name]
    world, race = RaceWorld(worth, spent, seed=1, outliers=outliers), Race(len(worth))
    best = max(world.gain(arm) for arm in range(len(worth)))
    assert world.run(race, 1000, running) > 0.75 * best  # the price of finding out
    assert world.run(race, 30000, running) > 0.97 * best


@pytest.mark.parametrize("running", [1, 4, 32])
@pytest.mark.parametrize("seed", range(3))
def test_where_every_draft_loses_it_is_plain_decoding_but_for_two_percent(running, seed):
    worth, spent = WORLDS["loses"]
    world, race = RaceWorld(worth, spent, seed=seed, outliers=0.02), Race(len(worth))
    world.run(race, 500, running)
    assert world.run(race, 20000, running) > 0.98


@pytest.mark.parametrize("bursts", [0.0, 0.05])
@pytest.mark.parametrize("best", [0.85, 0.94, 1.05, 1.15, 2.0])
def test_on_a_processor_shared_with_others(best, bursts):
    """Plain steps are slow for a while after drafts, drafts fast after them; and a busy neighbour is nobody's fault."""
    worth = [1, 5 * best, 4 * 0.95 * best, 9 * 0.97 * best]
    speeds = []
    for seed in range(4):
        world = RaceWorld(worth, [1, 5, 4, 9], seed=seed, noise=0.1, crowd=0.8, bursts=bursts)
        race = Race(4)
        world.run(race, 2000, 2)
        speeds.append(world.run(race, 30000, 2))
    assert sum(speeds) / 4 > 0.97 * max(1.0, best)


def test_a_change_is_followed():
    """An arm that was the best turns bad, and good again; each time the better one takes over."""
    good, bad = 1.6, 0.5

    def quality(clock):
        return 2.0 * (bad if 10000 <= clock < 40000 else good)

    world, race = RaceWorld([1, quality, 1.5], [1, 2.0, 1.9], seed=2), Race(3)
    world.run(race, 10000)
    assert race.best == 1
    assert world.run(race, 1500) > 0.9  # soon noticed
    assert race.best == 0
    world.run(race, 28500)
    assert race.best == 0
    world.run(race, 15000)
    assert race.best == 1


def test_slow_drift_of_all_speeds_does_no_harm():
    """The reader's unit of time is off by up to 40 %, ever slower and faster."""
    worth, spent = WORLDS["wins"]
    world = RaceWorld(worth, spent, seed=3, drift=lambda clock: 1 + 0.8 * abs(clock % 4000 / 4000 - 0.5))
    race = Race(len(worth))
    world.run(race, 2000)
    assert world.run(race, 30000) > 0.95 * 1.6


def test_nothing_is_ever_given_up():
    """Even the worst arm is tried again, ever more seldom."""
    world, race = RaceWorld([1, 0.3], [1, 2.0], seed=4), Race(2)
    trials = []
    for _ in range(4):
        world.run(race, 20000)
        trials.append(race.arms[1].trials)
    assert trials[0] >= 2 and all(a < b for a, b in pairwise(trials))
    assert trials[-1] < 80000 * 0.01 / (4 * 3.0)  # steps of a trial that is broken off at once; its losses


def test_a_new_regime_starts_from_its_neighbour():
    """Arms that were hopeless there are tried late here; the best one is played soon."""
    worth, spent = WORLDS["wins"]
    world, race = RaceWorld(worth, spent, seed=5), Race(len(worth))
    world.run(race, 3000)
    assert race.best == 3
    others = {4: Race(len(worth)), 5: race}  # the nearer one knows nothing: the other is asked
    new = Race(len(worth), 3, others, lambda arm, fed: spent[arm])
    assert new.best == 3
    played = [world.step(new) for _ in range(100)]
    assert played[0] == 0 and new.best == 3
    assert 4 not in played and played.count(3) > 20


def test_what_steps_cost_here_decides_which_arm_a_new_regime_begins_with():
    """The arm that was best elsewhere brings as many tokens here, but its rows are dear: another one leads at once."""
    worth, spent = WORLDS["wins"]
    world, race = RaceWorld(worth, spent, seed=5), Race(len(worth))
    world.run(race, 3000)
    assert race.best == 3
    dear = [1, 1.5, 2, 4.5, 9, 2.5, 2.5]
    new = Race(len(worth), 4, {5: race}, lambda arm, fed: dear[arm])
    assert new.best == 1
    assert new.arms[3].gain == pytest.approx(4 / 4.5, rel=0.1)


def test_rests_are_plain_and_end_when_a_trial_is_due():
    world, race = RaceWorld([1, 0.5], [1, 2.0], seed=6), Race(2)
    assert race.rest(4) == 11  # nothing is known yet: caches fill
    world.run(race, 3000)
    rests, trials = [], race.arms[1].trials
    for _ in range(400):
        plain, due = race.playing == 0, race.time >= race.arms[1].due
        rests.append(race.rest(4))
        assert rests[-1] == 0 or plain
        assert rests[-1] < 12 or not due
        world.step(race)
    assert 100 < max(rests) < 128 and race.arms[1].trials > trials


def test_a_rest_tells_as_much_as_its_steps_one_by_one():
    races, spent = [Race(1), Race(1)], [1.0, 1.25, 0.75, 1.0]
    for i in range(36):
        races[0].observe(0, 4, 1.0, spent[i % 4], 1.0, 0.0, False)
    for steps in (12, 8, 16):
        races[1].observe_rest(4, (9 * spent)[:steps], False)
    assert races[0].time == pytest.approx(races[1].time) == pytest.approx(36)
    assert races[0].arms[0].gain == pytest.approx(races[1].arms[0].gain) == pytest.approx(1.0)


def test_a_rest_after_a_change_tells_of_the_steps_behind_it():
    race = Race(1)
    race.observe_rest(4, [1.0] * 12, False)
    race.observe_rest(4, [2.0] * 12 + [1.0] * 7, True)
    assert not race.is_cold and len(race._usual) == 7
    assert race.rest(4) == 127  # no arm will ever be due


def test_an_arm_whose_steps_differ_is_believed():
    """As of a hybrid that asks its dearer part sometimes: its gain is 0.85, not that of its cheap steps."""
    world, race = RaceWorld([1, 4 * 0.85], [1, 4.0], seed=9, cold=0.0), Race(2)
    dear = world.rng.random(100000) < 0.45
    seen = world._seen
    world._seen = lambda took: (
        seen(took) * ((1.9 if dear[int(world.clock)] else 1.0) / 1.405 if took > 2 else 1.0)
    )
    world.run(race, 3000)
    assert world.run(race, 30000) > 0.98
    assert race.arms[1].gain == pytest.approx(0.85, rel=0.05)


def test_a_clock_that_stands_still_breaks_nothing():
    race = Race(3)
    for arm in (0, 1, 2, 0, 1):
        for _ in range(40):
            race.observe(arm, 4, 1.0, 0.0, 1.0, 0.0, False)
    assert race.best in range(3)


def test_steps_of_an_arm_that_another_rank_chose_count_for_that_arm():
    race = Race(3)
    for _ in range(200):
        race.observe(2, 4, 1.0, 0.5, 0.5, 0.0, False)
    assert race.arms[2].gain == pytest.approx(2.0) and race.best == 2
    assert not race.arms[1].spent


def test_equal_inputs_give_equal_plays():
    plays = []
    for _ in range(2):
        world, race = RaceWorld(*WORLDS["close"], seed=7, outliers=0.05), Race(7)
        plays.append([world.step(race) for _ in range(5000)])
    assert plays[0] == plays[1] and len(set(plays[0])) == 7


def test_state_survives_a_round_trip_through_json():
    world, race = RaceWorld(*WORLDS["wins"], seed=8), Race(7)
    world.run(race, 3000)
    other = Race(7)
    other.load_state_dict(json.loads(json.dumps(race.state_dict())))
    assert other.state_dict() == race.state_dict()
    assert other.playing == other.best == race.best == 3
    assert world.run(other, 1000) > 0.93 * 1.6  # nothing is found out again

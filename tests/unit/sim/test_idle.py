import numpy as np
import pytest

from megatron_tlt.sim.idle import Adaptation, IdleTime
from tests.helpers.sim import sim_config, straight

TRAINS = "idle.train_drafter=true"


def waits(ends, *overrides, step=0.1, config=None):
    config = config or sim_config(TRAINS, *overrides)
    return IdleTime(config, step).waits(straight(ends))


def test_nobody_trains_without_being_asked():
    found = waits([1.0, 5.0], config=sim_config("idle.train_drafter=false"))
    assert found.micro_steps == 0 and found.late == 0.0
    assert found.ends.tolist() == [1.0, 5.0] and not found.trains.any()


def test_idle_replicas_train_until_the_slowest_is_done():
    found = waits([1.0, 3.0, 5.0])
    assert found.trains[2] == 0.0
    assert found.trains[0] == pytest.approx(4.0, abs=0.3)
    assert found.trains[1] == pytest.approx(2.0, abs=0.3)
    assert 0.0 <= found.late < 0.1  # one micro-step at most
    assert found.micro_steps == pytest.approx(60, abs=5)


def test_windows_have_their_limits():
    assert waits([5.0, 5.0]).micro_steps == 0
    assert waits([4.99, 5.0], "idle.min_tail_seconds=1.0").micro_steps == 0


def test_the_least_micro_steps_are_taken_behind_the_rollout_too():
    alone = waits([5.0], "idle.min_steps_per_window=20")
    assert (alone.micro_steps, alone.late) == (20, pytest.approx(2.0)) and alone.trains.tolist() == [2.0]
    two = waits([4.0, 5.0], "idle.min_steps_per_window=20")  # the first has taken some ten of them by then
    assert two.micro_steps == 40 and two.late == pytest.approx(2.0) and two.trains.tolist() == pytest.approx([2.0, 2.0])
    off = waits([5.0], config=sim_config("idle.train_drafter=false", "idle.min_steps_per_window=20"))
    assert (off.micro_steps, off.late) == (0, 0.0)


def test_windows_that_become_shorter_are_trained_in_before_long():
    """As in `tests/unit/idle/test_window.py`."""
    idle_time = IdleTime(sim_config(TRAINS), 0.05)
    for _ in range(2):
        idle_time.waits(straight([1.0, 6.0]))
    for _ in range(20):
        found = idle_time.waits(straight([1.0, 2.0]), lambda starts, until: [until] * len(starts))
    assert found.trains[0] > 0.0 and found.pre_rolls[0] > 0.0


def test_training_adapts_the_drafter_and_updates_undo_it():
    drafter = Adaptation(sim_config("training.tokens_to_adapt=1000", "training.drift=0.2"))
    drafter.train(1000)
    assert drafter.quality == pytest.approx(1 - np.exp(-1))
    drafter.train(500)
    assert drafter.quality == pytest.approx(1 - np.exp(-1.5))
    before = drafter.quality
    drafter.policy_moved()
    assert drafter.quality == pytest.approx(0.8 * before)

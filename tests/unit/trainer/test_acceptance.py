import pytest

from megatron_tlt.trainer.acceptance import AcceptanceMonitor


def row(drafted=400, accepted=200, pre_rolled=0):
    """`pre_rolled`: tokens of pre-rolled drafts besides, all accepted."""
    names = {
        "drafted_tokens": drafted + pre_rolled,
        "accepted_tokens": accepted + pre_rolled,
        "pre_rolled_drafted": pre_rolled,
        "pre_rolled_accepted": pre_rolled,
    }
    return {f"engine/spec_{name}": float(value) for name, value in names.items()}


@pytest.mark.parametrize(("accepted", "what"), [(0, "no drafted token"), (400, "every drafted token")])
def test_it_warns_once_after_a_window_and_again_when_it_comes_back(accepted, what):
    monitor, bad, good = AcceptanceMonitor(), row(accepted=accepted), row()
    for _ in range(4):
        assert monitor.check(bad) == []
    (warning,) = monitor.check(bad)
    assert what in warning
    assert [monitor.check(bad), monitor.check(good)][0] == []
    for _ in range(5):
        assert monitor.check(good) == []
    assert [len(monitor.check(bad)) for _ in range(6)].count(1) == 1


def test_pre_rolled_drafts_are_none_of_the_drafters():
    monitor = AcceptanceMonitor()
    assert any(monitor.check(row(accepted=0, pre_rolled=50)) for _ in range(5)), "no drafted token is accepted"
    monitor = AcceptanceMonitor()
    assert not any(monitor.check(row(drafted=0, accepted=0, pre_rolled=400)) for _ in range(9)), "of the same policy"


def test_few_drafts_and_steps_without_drafts_give_no_warning():
    monitor = AcceptanceMonitor()
    assert [monitor.check(row(drafted=100, accepted=0)) for _ in range(9)] == [[]] * 9
    monitor = AcceptanceMonitor()
    assert [monitor.check(row(drafted=0, accepted=0)) for _ in range(9)] == [[]] * 9

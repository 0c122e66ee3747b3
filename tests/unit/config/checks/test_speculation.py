"""Rules about speculation: the bandit's arms and buckets, and settings of single kinds."""

import pytest

from megatron_tlt.config.checks.speculation import check_idle, check_speculation, unread_settings, unread_steps_warning
from megatron_tlt.config.load import build_config
from megatron_tlt.config.speculation import BanditSection, SpeculationSection


def test_every_problem_of_the_bandit_is_found():
    section = SpeculationSection(
        drafter="suffix", selector="beg_mab", bandit=BanditSection(arms=(2, 2), thresholds=(3, 3))
    )
    problems = [str(problem) for problem in check_speculation(section)]
    assert [p.split(" = ")[0].rsplit(".", 1)[1] for p in problems] == ["arms", "thresholds"]
    assert not list(check_speculation(SpeculationSection(drafter="suffix", selector="beg_mab")))


@pytest.mark.parametrize(
    ("draft_len", "arms", "is_refused"),
    [(4, (6, 2), True), (6, (6, 2), False), (16, (6, 2), False), (11, (16, 2), False)],  # 11: the default
)
def test_a_bandit_drafts_no_more_than_what_is_asked_for(draft_len, arms, is_refused):
    bandit = BanditSection(arms=arms)
    for selector in ("beg_mab", "fixed"):
        section = SpeculationSection(drafter="suffix", selector=selector, draft_len=draft_len, bandit=bandit)
        found = [p.path for p in check_speculation(section)]
        assert found == ["rollout.speculation.draft_len"] * (is_refused and selector == "beg_mab")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["drafter_path=d", "draft_vocab_size=64"], ["drafter_path = d", "draft_vocab_size = 64"]),
        (
            ["drafter=suffix", "drafter_path=d", "layers=[1,2,3]", "block_size=4", "block_layers=2"],
            ["layers", "block_size", "block_l"],
        ),
        (["drafter=eagle", "drafter_path=d", "draft_vocab_size=64"], []),
        ([], []),
    ],
)
def test_settings_of_a_drafter_that_is_not_there_are_named(overrides, named):
    config = build_config({"model": {"path": "m"}}, [f"rollout.speculation.{text}" for text in overrides])
    found = unread_settings(config.rollout.speculation)
    assert len(found) == len(named)
    assert all(f"rollout.speculation.{name}" in text for name, text in zip(named, found, strict=True))


def test_steps_of_a_training_that_is_not_there_are_named():
    for given, is_named in ((["idle.train_drafter=true"], False), ([], True), (["idle.min_steps_per_window=0"], False)):
        config = build_config({"model": {"path": "m"}}, ["idle.min_steps_per_window=3", *given])
        assert (unread_steps_warning(config) is not None) == is_named


@pytest.mark.parametrize(("drafter", "refused"), [("eagle", 3), ("eagle3", 2), ("dspark", 0)])
def test_settings_that_a_kind_does_not_have_are_refused(drafter: str, refused: int):
    given = {"drafter": drafter, "drafter_path": "d", "layers": (1, 2, 3), "block_size": 6, "block_layers": 3}
    config = build_config({"model": {"path": "m"}, "rollout": {"speculation": given}})
    problems = [str(p) for p in check_idle(config, None, 2, None)]
    assert len(problems) == refused and all("must be null with drafter" in p for p in problems)


def test_a_block_drafter_costs_what_its_settings_say_and_one_pass_of_any_length():
    facts = SpeculationSection(drafter="dspark", layers=(1, 2, 3, 5), block_size=6, block_layers=3).trained
    assert facts is not None and (facts.state_parts, facts.cached_layers) == (5, 3)
    assert facts.passes(1) == facts.passes(6) == 1


def test_a_request_has_as_many_rows_as_its_longest_draft_by_any_strategy():
    bandit = SpeculationSection(drafter="suffix", selector="beg_mab", bandit=BanditSection(arms=(16, 0)))
    assert bandit.rows_each == 17
    assert bandit.model_copy(update={"bandit": BanditSection(arms=(4, 0))}).rows_each == 5
    assert bandit.model_copy(update={"selector": "cost_model"}).rows_each == 12
    assert bandit.model_copy(update={"drafter": "none"}).rows_each == 1

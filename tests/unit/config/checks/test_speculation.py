"""Rules about speculation: the bandit's arms and buckets, and settings of single kinds."""

import pytest

from megatron_tlt.config.checks.speculation import check_idle, check_speculation
from megatron_tlt.config.load import build_config
from megatron_tlt.config.speculation import BanditSection, SpeculationSection


def test_every_problem_of_the_bandit_is_found():
    section = SpeculationSection(
        drafter="suffix", selector="beg_mab", bandit=BanditSection(arms=(2, 2), thresholds=(3, 3))
    )
    problems = [str(problem) for problem in check_speculation(section)]
    assert [p.split(" = ")[0].rsplit(".", 1)[1] for p in problems] == ["arms", "thresholds"]
    assert not list(check_speculation(SpeculationSection(drafter="suffix", selector="beg_mab")))


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

"""Rules about speculation: the bandit's arms and buckets."""

from megatron_tlt.config.checks.speculation import check_speculation
from megatron_tlt.config.speculation import BanditSection, SpeculationSection


def test_every_problem_of_the_bandit_is_found():
    section = SpeculationSection(
        drafter="suffix", selector="beg_mab", bandit=BanditSection(arms=(2, 2), thresholds=(3, 3))
    )
    problems = [str(problem) for problem in check_speculation(section)]
    assert [p.split(" = ")[0].rsplit(".", 1)[1] for p in problems] == ["arms", "thresholds"]
    assert not list(check_speculation(SpeculationSection(drafter="suffix", selector="beg_mab")))

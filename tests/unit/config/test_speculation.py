"""Rules about speculation: the bandit's arms and buckets, values of earlier versions."""

import pytest

from megatron_tlt.config.speculation import BanditSection, SpeculationSection, check_speculation, parse_arm
from megatron_tlt.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    ["4_1", "a_1_2", "4_1_5_6", "", "0_1_2", "0_2_1", "33_1_4", "4_5_6", "4_0_3", "4_1_6", "4_1_1", "-1_1_1"],
)
def test_what_is_no_arm_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.bandit\.arms"):
        parse_arm(text)
    assert parse_arm("6_2_12") == (6, 2, 12)


def test_every_problem_of_the_bandit_is_found():
    bandit = BanditSection(arms=("3_1_9", "2_1_3", "2_1_3"), thresholds=(3, 3))
    section = SpeculationSection(drafter="suffix", selector="beg_mab", bandit=bandit)
    problems = [str(problem) for problem in check_speculation(section)]
    assert [p.split(" = ")[0].rsplit(".", 1)[1] for p in problems] == ["arms", "arms", "thresholds"]
    assert not list(check_speculation(SpeculationSection(drafter="suffix", selector="beg_mab")))

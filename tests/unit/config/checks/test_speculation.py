"""Rules about speculation: the bandit's arms and buckets, and settings of single kinds."""

import pytest

from megatron_tlt.config.checks.speculation import check_idle, check_speculation, idle_warnings, unread_settings
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
        (["drafter=suffix", "bandit.arms=[2,0]", "suffix.history_mib=9"], ["bandit has no effect with"]),
        (["drafter=eagle", "selector=beg_mab", "bandit.arms=[2,0]", "suffix.history_mib=9"], ["suffix has no effect"]),
        (["bandit.arms=[2,0]", "suffix.history_mib=9"], []),
        ([], []),
    ],
)
def test_settings_of_a_drafter_that_is_not_there_are_named(overrides, named):
    config = build_config({"model": {"path": "m"}}, [f"rollout.speculation.{text}" for text in overrides])
    found = unread_settings(config.rollout.speculation)
    assert len(found) == len(named)
    assert all(f"rollout.speculation.{name}" in text for name, text in zip(named, found, strict=True))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["min_steps_per_window=3"], ["min_steps_per_window = 3"]),
        (["min_steps_per_window=3", "train_drafter=true"], []),
        (["pre_rollout_mib=9", "min_tail_seconds=1"], []),
        (["pre_rollout=false", "pre_rollout_mib=9", "train_drafter=true", "min_tail_seconds=1"], ["pre_rollout_mib"]),
        (["pre_rollout=false", "min_tail_seconds=1"], ["min_tail_seconds = 1"]),
    ],
)
def test_settings_of_idle_ranks_that_nothing_reads_are_named(overrides, named):
    found = idle_warnings(build_config({"model": {"path": "m"}}, [f"idle.{text}" for text in overrides]), "cpu", 2)
    assert [text[: len(name) + 5] for text, name in zip(found, named, strict=True)] == [f"idle.{n}" for n in named]
    evaluated = build_config({"model": {"path": "m"}}, [f"idle.{text}" for text in overrides])
    evaluated = evaluated.model_copy(update={"train": evaluated.train.model_copy(update={"num_steps": 0})})
    assert not idle_warnings(evaluated, "cpu", 2)


@pytest.mark.parametrize(
    ("overrides", "ranks", "named"),
    [
        ([], 1, ["train_drafter", "pre_rollout"]),
        (["rollout.tp=2"], 2, ["train_drafter", "pre_rollout"]),
        ([], 2, []),
        ([], None, []),
        (["idle.min_steps_per_window=1"], 1, ["pre_rollout"]),
        (["env.kind=calculator"], 1, ["pre_rollout"]),  # it trains while all trajectories wait
        (["env.kind=calculator", "rollout.release_cache=true"], 1, ["train_drafter", "pre_rollout"]),
    ],
)
def test_what_one_replica_never_does_is_named(overrides, ranks, named):
    """A configured drafter drafts all the same, so this is no problem."""
    given = ["rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=d", "idle.train_drafter=true"]
    config = build_config({"model": {"path": "m"}}, [*given, "idle.pre_rollout=true", *overrides])
    found = idle_warnings(config, "cpu", ranks)
    whole = [f"idle.{name} = true has no effect with one rollout replica, which never waits" for name in named]
    assert [text[: len(start)] for text, start in zip(found, whole, strict=True)] == whole
    assert not list(check_idle(config, None, ranks or 1, "cpu"))


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

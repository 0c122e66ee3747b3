"""Settings of the algorithm that are allowed and do nothing."""

from pathlib import Path

import pytest

from megatron_tlt.config.checks.learning import algorithm_warnings, ratio_warning, without_effect
from megatron_tlt.config.load import build_config, load_config

ROOT = Path(__file__).parents[4]
CONFIGS = [*sorted((ROOT / "configs/recipes").glob("*.yaml")), ROOT / "configs/quickstart.yaml"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), []),
        (("ratio_clip_low=0.1", "ratio_clip_high=0.28", "name=dapo"), ["ratio_clip_low", "ratio_clip_high"]),
        (("ratio_clip_high=0.28", "mini_batches=2"), []),
        (("kl_estimator=k2",), ["kl_estimator = k2"]),
        (("kl_estimator=k2", "kl_coef=0.1"), []),
        (("kl_estimator=k2", "name=distill"), ["kl_estimator = k2"]),
        (("kl_in=reward", "kl_coef=0.1", "kl_estimator=k2"), ["kl_estimator = k2"]),
        (("kl_in=reward", "kl_coef=0.1", "kl_estimator=k1"), []),
        (("advantage_eps=1e-4",), []),
        (("advantage_eps=1e-4", "name=rloo"), ["advantage_eps = 0.0001"]),
        (("advantage_eps=1e-4", "name=dr_grpo"), ["advantage_eps = 0.0001"]),
        (("max_sampling_rounds=9",), ["max_sampling_rounds = 9"]),
        (("max_sampling_rounds=9", "dynamic_sampling=true"), []),
    ],
)
def test_settings_without_effect_are_named(overrides, named):
    config = build_config({"model": {"path": "m"}}, [f"algorithm.{text}" for text in overrides])
    found = without_effect(config.algorithm)
    assert len(found) == len(named)
    assert all(text.startswith(f"algorithm.{field}") for field, text in zip(named, found, strict=True))
    assert all(" has no effect with" in text for text in found)


@pytest.mark.parametrize(
    ("name", "mini_batches", "is_warned"), [("gspo", 1, True), ("gspo", 2, False), ("grpo", 1, False)]
)
def test_gspo_with_one_update_a_step_is_a_warning(name, mini_batches, is_warned):
    given = [f"algorithm.name={name}", f"algorithm.mini_batches={mini_batches}"]
    found = ratio_warning(build_config({"model": {"path": "m"}}, given).algorithm)
    assert (found is not None and "the gradient is that of grpo" in found) == is_warned


@pytest.mark.parametrize(
    ("name", "kl_in", "is_warned"),
    [
        ("grpo", "reward", True),
        ("dapo", "reward", True),
        ("gspo", "reward", True),
        ("rloo", "reward", False),
        ("reinforce_pp", "reward", False),
        ("grpo", "loss", False),
    ],
)
def test_a_kl_that_a_group_s_deviation_divides_is_a_warning(name, kl_in, is_warned):
    given = [f"algorithm.name={name}", f"algorithm.kl_in={kl_in}", "algorithm.kl_coef=0.1"]
    found = algorithm_warnings(build_config({"model": {"path": "m"}}, given).algorithm)
    assert any("the KL pulls at full size" in text for text in found) == is_warned


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_recipe_has_such_a_setting(path):
    algorithm = load_config(path).algorithm
    assert without_effect(algorithm) == [] and ratio_warning(algorithm) is None

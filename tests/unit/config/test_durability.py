"""The settings of what survives a fault: defaults, ranges, documentation."""

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import leaves
from megatron_tlt.errors import ConfigError


def build(**sections):
    return build_config({"model": {"path": "m"}, **sections})


def test_defaults_protect():
    config = build()
    assert config.rollout_cache.enabled
    assert config.train.max_nonfinite_steps == 3
    assert config.rewards.worker_memory_mib < 10 * 1024  # a function that takes 10 GB is stopped


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("rollout_cache", "sync_seconds", -1.0),
        ("rollout_cache", "max_mib", 0),
        ("rollout_cache", "enabled", "sometimes"),
        ("train", "max_nonfinite_steps", -1),
        ("rewards", "worker_memory_mib", 0),
    ],
)
def test_values_out_of_range_are_named(section, field, value):
    with pytest.raises(ConfigError, match=rf"{section}\.{field}"):
        build(**{section: {field: value}})


def test_every_setting_says_what_it_is():
    found = {leaf.path: leaf.doc for leaf in leaves(Config)}
    for path in ("rollout_cache.enabled", "rollout_cache.sync_seconds", "train.max_nonfinite_steps"):
        assert len(found[path]) > 40

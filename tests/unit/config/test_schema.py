"""What an error says that a setting may be is what pydantic accepts, in every form that an annotation has."""

from typing import Any

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import field_allowed
from megatron_tlt.config.speculation import BanditSection
from megatron_tlt.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("rollout.top_p", 2, "number > 0 and <= 1"),
        ("rollout.vllm.hidden_mib", -1, "integer >= 0"),
        ("cluster.memory_gib", 0, "number > 0 or null"),
        ("rollout.speculation.block_size", 1, "integer >= 2 and <= 32 or null"),
        ("drafter.draft_steps", 17, "'auto' or integer >= 1 and <= 16"),
        ("rollout.speculation.bandit.arms.0", 33, "integer >= 0 and <= 32"),
        ("data.train.tasks.0.weight", 0, "number > 0"),
        ("actor.dtype", "fp8", "one of 'fp32', 'bf16'"),
    ],
)
def test_every_bound_is_said(path: str, value: Any, said: str) -> None:
    """Of plain values, alternatives, items of lists and fields of their sections."""
    tree: Any = value
    for step in reversed(path.split(".")):
        tree = [tree] if step == "0" else {step: tree}
    with pytest.raises(ConfigError) as caught:
        build_config(tree, (), Config)
    assert next(problem.allowed for problem in caught.value.problems if problem.path == path) == f"must be {said}"


def test_the_page_says_bounds_of_items() -> None:
    assert field_allowed(BanditSection.model_fields["arms"]).endswith("list of integer >= 0 and <= 32")

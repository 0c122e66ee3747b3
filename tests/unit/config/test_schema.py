"""What an error says that a setting may be is what pydantic accepts, in every form that an annotation has."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.config.schema import element_of, field_allowed, section_of
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


def sections_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`model` and every section below it, those of a list's elements, too."""
    yield model
    for field in model.model_fields.values():
        inner = section_of(field.annotation) or section_of(element_of(field.annotation))
        if inner is not None:
            yield from sections_of(inner)


def is_refused(section: type[BaseModel], name: str, value: Any) -> bool:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return any(detail["loc"][0] == name for detail in error.errors())
    return False


def test_true_is_no_number() -> None:
    """Python takes it for 1: also in alternatives and lists."""
    numbers = {
        (section, name): [True] if "list of" in allowed else True
        for section in {*sections_of(Config), *sections_of(SftConfig)}
        for name, field in section.model_fields.items()
        if re.search("integer|number", allowed := field_allowed(field)) and "true or false" not in allowed
    }
    assert len(numbers) > 50
    taken = [f"{s.__name__}.{name}" for (s, name), value in numbers.items() if not is_refused(s, name, value)]
    assert taken == []

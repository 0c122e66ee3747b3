"""What an export checks before it loads anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.cli.export import checked
from megatron_tlt.config.load import load_config
from megatron_tlt.errors import ConfigError
from tests.helpers.mpi import ROOT


@pytest.mark.parametrize("recipe", ["grpo-qwen2.5-7b-1n8g", "grpo-llama3.3-70b-32n8g", "grpo-qwen3-30b-a3b-8n8g"])
def test_one_rank_takes_a_large_recipe_but_for_files_that_are_not_here(recipe):
    world: Any = SimpleNamespace(size=1, device=torch.device("cuda"), is_main=True, broadcast_object=lambda v: v)
    with pytest.raises(ConfigError) as caught:
        checked(load_config(ROOT / f"configs/recipes/{recipe}.yaml"), world)
    assert {p.path for p in caught.value.problems} <= {"model.path", "data.train.path", "data.eval.path"}

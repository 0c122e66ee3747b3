"""The factors that training starts from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor import policy
from megatron_tlt.actor.hf_names import Slot
from megatron_tlt.actor.lora import factor_reader
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.trainer import models
from tests.helpers.tiny_models import TINY


def test_new_factors_are_those_of_the_seed_and_their_name() -> None:
    names = [f"layers.{layer}.q_proj.lora_{factor}" for layer in (0, 1) for factor in "AB"]
    adapters = {Slot((name,), (), 0, "column"): (2, 4) for name in names}
    drawn = {}
    for seed in (0, 3):
        read = factor_reader(LoraSection(rank=2), TINY, adapters, seed)
        drawn[seed] = [read(name) for name in names]
        assert all(torch.equal(read(name), factor) for name, factor in zip(names, drawn[seed], strict=True))
        assert not torch.equal(drawn[seed][0], drawn[seed][2]) and not drawn[seed][1].any()
    assert not torch.equal(drawn[0][0], drawn[3][0]) and torch.equal(drawn[0][1], drawn[3][1])
    first = torch.tensor([0.0022334, 0.3572614, -0.1250094, -0.2093413])  # of runs before the seed counted
    torch.testing.assert_close(drawn[0][0][0], first)


def test_the_seed_of_a_run_is_that_of_its_new_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MegatronPolicy", lambda *_, **options: options)
    config = build_config({"model": {"path": "m"}}, ["train.seed=3"], Config)
    algorithm = SimpleNamespace(needs_reference=False)
    assert models._policy(config, None, algorithm)["seed"] == 3  # type: ignore[arg-type, index]

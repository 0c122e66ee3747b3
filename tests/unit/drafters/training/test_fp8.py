"""FP8 in the drafter: what is refused, and Transformer Engine's branch against a fake with recorded names."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.training.batching import collate
from megatron_tlt.drafters.training.fp8 import use_fp8
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.errors import ConfigError
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen2"]
CPU = torch.device("cpu")


def model() -> EagleModel:
    out = EagleModel(EagleConfig.of(CONFIG))
    out.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in out.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1, generator=generator)
    return out


def outputs(m: EagleModel, precision=nullcontext) -> list[torch.Tensor]:
    batch = collate([random_sequence(CONFIG, n, 3) for n in (12, 21)])  # 28 bases: not a multiple of 16
    embed, _ = lookup_tables(CONFIG)
    with precision():
        return m.unroll(embed, batch, PairLayout(batch), 3)


def test_no_gpu_is_an_error_that_names_the_alternatives() -> None:
    section = DrafterSection(online={"fp8": "te"})
    with pytest.raises(ConfigError, match=r"drafter\.online\.fp8 = 'te': needs a GPU.*here: off"):
        OnlineDrafterTrainer(model(), section)


def test_odd_sizes_are_named() -> None:
    odd = EagleModel(EagleConfig.of(replace(CONFIG, intermediate_size=90)))
    with pytest.raises(ConfigError, match=r"multiples of 16.*gate_proj \(90 x 64\).*down_proj \(64 x 90\)"):
        use_fp8(odd, CPU)


CUDA = torch.device("cuda", 0)  # as far as fp8.py asks; tensors stay on the CPU


def test_a_missing_package_is_an_error(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match="needs Transformer Engine for PyTorch"):
        use_fp8(model(), CUDA)


class FakeTe:
    """transformer_engine 2.20's names and its demands on shapes; the arithmetic is exact."""

    def __init__(self) -> None:
        self.recipes: list[object] = []
        self.calls = 0
        self.available = (True, "")
        fake = self

        class Linear(nn.Linear):
            def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
                super().__init__(in_features, out_features, bias)
                assert params_dtype == torch.float32 and torch.device(device).type == "cuda"

            def forward(self, inp, is_first_microbatch=None):
                assert fake.recipes, "outside autocast it would run in high precision"
                assert inp.shape[0] % 8 == 0 and inp.shape[0] % 16 == 0 and inp.shape[1] % 16 == 0
                assert self.weight.shape[0] % 16 == 0
                fake.calls += 1
                return super().forward(inp)

        @contextmanager
        def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
            assert enabled and not fake.recipes
            fake.recipes.append(recipe)
            yield
            fake.recipes.pop()

        self.recipe_class = type("Float8CurrentScaling", (), {})
        self.modules = {name: ModuleType(name) for name in self.names}
        pytorch = self.modules["transformer_engine.pytorch"]
        pytorch.Linear, pytorch.autocast = Linear, autocast
        pytorch.is_fp8_available = lambda return_reason=False: self.available
        self.modules["transformer_engine.common.recipe"].Float8CurrentScaling = self.recipe_class
        self.modules["transformer_engine"].pytorch = pytorch

    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
    )


def test_transformer_engine_runs_the_layers_linears_where_it_has_fp8(monkeypatch) -> None:
    fake = FakeTe()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fake.available = (False, "an older GPU")
    with pytest.raises(ConfigError, match="refused by Transformer Engine: an older GPU"):
        use_fp8(model(), CUDA)
    fake.available = (True, "")
    m, exact = model(), model()
    precision = use_fp8(m, CUDA)
    assert {n: tuple(p.shape) for n, p in m.named_parameters()} == EagleConfig.of(CONFIG).shapes()
    got = outputs(m, precision)
    # The base pass: k, v for all rows; then per step q, o, gate, up, down, and k, v of the chain from the second on.
    assert fake.calls == 2 + 3 * 5 + 2 * 2
    wanted = outputs(exact)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    sum(o.sum() for o in got).backward()
    sum(o.sum() for o in wanted).backward()
    for (name, a), (_, b) in zip(m.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")

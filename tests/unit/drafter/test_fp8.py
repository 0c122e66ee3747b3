"""FP8 in the drafter: emulation against exact arithmetic; the vendors' branches against fakes with recorded names."""

from __future__ import annotations

import builtins
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.fp8 import EmulatedFp8Linear, round_fp8, use_fp8
from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.eagle.config import DrafterConfig
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_sequence

CONFIG = FAMILIES["qwen2"]
CPU = torch.device("cpu")


def model() -> EagleModel:
    out = EagleModel(CONFIG)
    out.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in out.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1, generator=generator)
    return out


def outputs(m: EagleModel, precision=None) -> list[torch.Tensor]:
    batch = collate([random_sequence(CONFIG, n, 3) for n in (12, 21)])  # 28 bases: not a multiple of 16
    embed, _ = lookup_tables(CONFIG)
    if precision is None:
        return m.unroll(embed, batch, PairLayout(batch), 3)
    with precision():
        return m.unroll(embed, batch, PairLayout(batch), 3)


# -- rounding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_rounding_is_to_the_nearest_of_the_formats_values(kind, bits: int) -> None:
    """Against a table of every value the format has."""
    table = torch.arange(256, dtype=torch.uint8).view(kind).float()
    table = table[table.isfinite()].unique()
    x = torch.cat([torch.randn(500) * 3, torch.tensor([0.0, 1e-9])])
    scale = float(table.max()) / x.abs().max()
    nearest = table[(x[:, None] * scale - table).abs().argmin(1)] / scale
    got = round_fp8(x, kind)
    gap = (got - nearest).abs() * scale  # ties may go either way: then both are as near
    assert torch.all((gap == 0) | ((got - x).abs() <= (nearest - x).abs() * (1 + 1e-5)))
    large = x.abs() > x.abs().max() / 64
    assert ((got - x).abs() <= x.abs() * 2.0 ** -(bits + 1) * 1.001)[large].all()
    assert torch.equal(round_fp8(torch.zeros(3), kind), torch.zeros(3))
    assert round_fp8(x.bfloat16(), kind).dtype == torch.bfloat16


def test_emulated_products_and_gradients_by_hand() -> None:
    layer = EmulatedFp8Linear(32, 16, True)
    x = torch.randn(7, 32, requires_grad=True)
    up = torch.randn(7, 16)
    out = layer(x)
    out.backward(up)
    xq, wq = round_fp8(x.detach(), torch.float8_e4m3fn), round_fp8(layer.weight.detach(), torch.float8_e4m3fn)
    gq = round_fp8(up, torch.float8_e5m2)
    torch.testing.assert_close(out, xq @ wq.T + layer.bias)
    torch.testing.assert_close(x.grad, gq @ wq)
    torch.testing.assert_close(layer.weight.grad, gq.T @ xq)
    torch.testing.assert_close(layer.bias.grad, up.sum(0))
    error = (out - nn.functional.linear(x, layer.weight, layer.bias)).norm() / out.norm()
    assert 0.005 < error < 0.08


def test_emulation_keeps_names_values_and_what_is_not_a_linear_of_the_layer() -> None:
    m, exact = model(), model()
    wanted = [o.detach() for o in outputs(exact)]
    precision = use_fp8(m, "emulate", CPU)
    assert {n: tuple(p.shape) for n, p in m.named_parameters()} == DrafterConfig.eagle(CONFIG).shapes()
    for (name, a), (_, b) in zip(m.named_parameters(), exact.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert type(m.fc) is nn.Linear
    for j, (a, b) in enumerate(zip(outputs(m, precision), wanted, strict=True)):
        assert 0 < (a - b).norm() / b.norm() < 0.1, j


# -- what is refused ------------------------------------------------------------------------------------------


def test_no_gpu_is_an_error_that_names_the_alternatives() -> None:
    section = DrafterSection(online={"fp8": "te"})
    with pytest.raises(ConfigError, match=r"drafter\.online\.fp8 = 'te': needs a GPU .*off or emulate"):
        OnlineDrafterTrainer(model(), section)


def test_odd_sizes_are_named() -> None:
    odd = EagleModel(replace(CONFIG, intermediate_size=90))
    with pytest.raises(ConfigError, match=r"multiples of 16.*gate_proj \(90 x 64\).*down_proj \(64 x 90\)"):
        use_fp8(odd, "emulate", CPU)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of capability 9.0 as far as fp8.py asks; tensors stay on the CPU."""
    capability = SimpleNamespace(value=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability.value)
    return capability


CUDA = torch.device("cuda", 0)


def test_older_gpus_and_missing_packages_are_errors(hopper, monkeypatch) -> None:
    hopper.value = (8, 0)
    with pytest.raises(ConfigError, match=r"this GPU has 8\.0"):
        use_fp8(model(), "te", CUDA)
    hopper.value = (9, 0)
    real = builtins.__import__

    def missing(name, *args):
        if name.startswith("transformer_engine"):
            raise ImportError(f"No module named {name}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="No module named"):
        use_fp8(model(), "te", CUDA)


# -- contracts with the vendors -------------------------------------------------------------------------------


class FakeTe:
    """transformer_engine 2.20's names and its demands on shapes; the arithmetic is emulated."""

    def __init__(self) -> None:
        self.recipes: list[object] = []
        self.calls = 0
        self.available = (True, "")
        fake = self

        class Linear(EmulatedFp8Linear):
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


def test_transformer_engine_runs_the_layers_linears(hopper, monkeypatch) -> None:
    fake = FakeTe()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    m, emulated = model(), model()
    emulated_outputs = outputs(emulated, use_fp8(emulated, "emulate", CPU))
    precision = use_fp8(m, "te", CUDA)
    assert {n: tuple(p.shape) for n, p in m.named_parameters()} == DrafterConfig.eagle(CONFIG).shapes()
    got = outputs(m, precision)
    # The base pass: k, v for all rows; then per step q, o, gate, up, down, and k, v of the chain from the second on.
    assert fake.calls == 2 + 3 * 5 + 2 * 2
    for a, b in zip(got, emulated_outputs, strict=True):
        torch.testing.assert_close(a, b)
    sum(o.sum() for o in got).backward()
    sum(o.sum() for o in emulated_outputs).backward()
    for (name, a), (_, b) in zip(m.named_parameters(), emulated.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")

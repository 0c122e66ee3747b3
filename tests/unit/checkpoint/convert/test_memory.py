"""Peak memory of a conversion, by what PyTorch allocates (a source of safetensors is mapped as a whole)."""

from __future__ import annotations

from math import prod

import pytest

from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.checkpoint.export import write_run
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.memory import live_bytes
from tests.helpers.tiny_models import random_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, config) of a model whose layers outweigh its largest parameter many times."""
    config = ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=256,
    )
    directory = tmp_path_factory.mktemp("memory") / "hf"
    save_hf(directory, config, random_weights(config))
    return directory, config


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_one_parameter_at_a_time(model, tmp_path, dtype):
    hf, config = model
    largest = max(prod(shape) for shape in config.parameter_shapes().values()) * 4
    assert config.num_parameters * 4 > 15 * largest
    parameter = 2 * largest  # gate and up together are one of Megatron's
    todo = MegatronConversion.plan(hf, dtype)
    todo.source.read("model.norm.weight")  # maps the file, which counts
    with live_bytes() as there:
        todo.write(tmp_path / "mg", SingleProcess())
    assert largest / 2 < there.peak <= 2 * parameter + 4096  # it, and what is written
    with live_bytes() as back:
        write_run(tmp_path / "mg/release", SingleProcess(), ModelSection(path=str(hf)), tmp_path / "back", "fp32")
    assert largest < back.peak <= 2 * parameter + 4096

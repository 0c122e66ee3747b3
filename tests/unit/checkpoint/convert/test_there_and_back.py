"""Hugging Face -> Megatron -> Hugging Face: names, shapes, bits and logits, against naive constructions."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import iter_weights
from tests.helpers.converted import FAMILIES, logits, make_model, naive_megatron, save_foreign
from tests.helpers.mpi import ROOT

sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> (directory, model): each tiny model once."""
    place = tmp_path_factory.mktemp("models")
    return {family: (place / family, make_model(family, place / family)) for family in FAMILIES}


def there(hf: Path, out: Path, dtype: str | None = None) -> Path:
    MegatronConversion.plan(hf, dtype).write(out, SingleProcess())
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_megatrons_tensors_and_back_the_same_bits_and_logits(models, tmp_path, family):
    from transformers import AutoModelForCausalLM

    hf, model = models[family]
    out = there(hf, tmp_path / "mg")
    wanted = naive_megatron(model, model.config.vocab_size)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(out / "release"), no_dist=True)
    assert set(TorchDistReader(out).tensors) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    HfConversion.plan(out, None, max_file_bytes=40_000).write(tmp_path / "hf", SingleProcess())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    found, wanted = dict(iter_weights(tmp_path / "hf")), dict(iter_weights(hf))
    assert found.keys() == wanted.keys()
    assert set(index["weight_map"]) == set(weight_files(hf))  # experts one by one
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    assert torch.equal(logits(back), logits(model))
    assert ModelConfig.from_hf(tmp_path / "hf") == ModelConfig.from_hf(hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_another_program_converts(models, tmp_path, family):
    """Padded to 128 rows with rubbish, unchunked, optimizer state beside it: as Megatron-LM might leave it."""
    hf, model = models[family]
    tensors = naive_megatron(model, padded_vocab=256)
    for prefix in ("optimizer", "chained_1.optimizer"):  # of one optimizer, and of one beside that of experts
        tensors[f"{prefix}.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(4)
    save_foreign(tmp_path / "mg", tensors, None if family == "llama" else 1200)
    HfConversion.plan(tmp_path / "mg", None, config=hf).write(tmp_path / "hf", SingleProcess())
    found = dict(iter_weights(tmp_path / "hf"))
    assert all(torch.equal(found[name], tensor) for name, tensor in iter_weights(hf))


@pytest.mark.parametrize("version", ["0.14", "0.15"])
def test_a_checkpoint_of_an_older_megatron_converts(models, tmp_path, monkeypatch, version):
    """Its .metadata names classes that megatron-core does not have any more."""
    hf, model = models["qwen3"]
    save_foreign(tmp_path / "mg", naive_megatron(model, padded_vocab=256))
    module = ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreSavePlan", SavePlan), ("MCoreMetadata", Metadata)):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    metadata = TorchDistReader(tmp_path / "mg").metadata
    metadata.all_local_plans = [module.MCoreSavePlan([])]
    vars(metadata.all_local_plans[0])["mcore_data"] = {"optimizer.state": {"shape": (3,)}}
    if version == "0.15":
        metadata.__class__ = module.MCoreMetadata
    (tmp_path / "mg" / ".metadata").write_bytes(pickle.dumps(metadata))
    HfConversion.plan(tmp_path / "mg", None, config=hf).write(tmp_path / "hf", SingleProcess())
    found = dict(iter_weights(tmp_path / "hf"))
    assert all(torch.equal(found[name], tensor) for name, tensor in iter_weights(hf))


def test_types_are_kept_or_chosen(models, tmp_path):
    hf, model = models["qwen3"]
    rounded = {n: t.to(torch.bfloat16) for n, t in iter_weights(hf)}
    out = there(hf, tmp_path / "bf16", "bf16")
    assert TorchDistReader(out).dtypes() == {torch.bfloat16}
    HfConversion.plan(out, None).write(tmp_path / "kept", SingleProcess())
    HfConversion.plan(out, "fp32").write(tmp_path / "widened", SingleProcess())
    kept, widened = dict(iter_weights(tmp_path / "kept")), dict(iter_weights(tmp_path / "widened"))
    assert all(t.dtype is torch.bfloat16 and torch.equal(t, rounded[n]) for n, t in kept.items())
    assert all(t.dtype is torch.float32 and torch.equal(t, rounded[n].float()) for n, t in widened.items())
    for name, word in (("bf16", "bfloat16"), ("kept", "bfloat16"), ("widened", "float32")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype" if "dtype" in config else "torch_dtype"] == word
    assert model.config.vocab_size == json.loads((tmp_path / "kept" / "config.json").read_text())["vocab_size"]


def test_tokenizer_and_config_come_along(tmp_path, models):
    hf = tmp_path / "hf"
    make_model("llama", hf)
    (hf / "tokenizer.json").write_text("{}")
    config = json.loads((hf / "config.json").read_text())
    out = there(hf, tmp_path / "mg")
    HfConversion.plan(out, None).write(tmp_path / "back", SingleProcess())
    for place in (out, tmp_path / "back"):
        assert (place / "tokenizer.json").read_text() == "{}"
        assert json.loads((place / "config.json").read_text()) == config
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    arguments = torch.load(out / "release" / "common.pt", weights_only=False)["args"]
    assert (arguments.num_layers, arguments.num_query_groups) == (3, 1)
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (1, 1)

"""Model directories and adapters of public reports: read as transformers and PEFT read them, or refused by name."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_tlt.actor.hf_names import adapter_slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.convert.hf_dir import HfDir
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.errors import BackendError, CheckpointError, ConfigError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import INDEX, SINGLE, model_problems, model_warnings
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.peft import ADAPTER_CONFIG, adapter_warning, peft_problems, peft_reader
from megatron_tlt.types import Prompt, SamplingParams
from tests.helpers.chat_models import edit_json
from tests.helpers.converted import naive_megatron, save_foreign
from tests.helpers.runs import generate_alone
from tests.helpers.tiny_models import hf_model

TARGETS = ("q_proj", "v_proj")
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tied model in one file."""
    hf_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(model: Path, **tensors: torch.Tensor) -> None:
    """Sets tensors of the one weight file; `__` in a name stands for a dot."""
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(model / SINGLE) | changed, model / SINGLE, metadata={"format": "pt"})


def save_adapter(model: Path, init: bool | str) -> Path:
    """An adapter of rank 4 and alpha 8 that PEFT makes and saves, its factors moved as by training."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights=init, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.01 * torch.randn(parameter.shape)
    adapted.save_pretrained(model.parent / "adapter")
    return model.parent / "adapter"


def read_adapter(model: Path, adapter: Path) -> tuple[list[str], Any]:
    """Problems with an adapter, and a function that merges it into the weight of a name."""
    lora = LoraSection(rank=4, alpha=8.0, targets=TARGETS, adapter_path=str(adapter))
    config = ModelConfig.from_hf(model)
    shapes = {slot.hf_names[0]: shape for slot, shape in adapter_slots(config, lora, 1).items()}
    problems = [problem.allowed for problem in peft_problems(lora, config, shapes)]

    def merged(name: str) -> torch.Tensor:
        read, base = peft_reader(lora, config, shapes), dict(iter_weights(model))[name]
        stem = name.removesuffix(".weight")
        return base + lora.scale * read(f"{stem}.lora_B.weight") @ read(f"{stem}.lora_A.weight")

    return problems, merged


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_merge_as_in_peft(model: Path, init: bool | str) -> None:
    adapter = save_adapter(model, init)
    problems, merged = read_adapter(model, adapter)
    assert not problems
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.self_attn.v_proj.weight"):
        torch.testing.assert_close(merged(name), theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_initialisations_that_change_the_base_are_refused(model: Path, init: str) -> None:
    adapter = save_adapter(model, init)
    (problem,), _ = read_adapter(model, adapter)
    assert problem.startswith("init_lora_weights in adapter_config.json must be ") and repr(init) in problem


# Of PEFT's fields, those whose value does not matter here: where the adapter comes from, and how it was trained.
FREE = {"r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "inference_mode", "auto_mapping"}
FREE |= {"base_model_name_or_path", "revision", "peft_version", "megatron_core", "runtime_config", "eva_config"}
FREE |= {"qalora_group_size", "ensure_weight_tying"}
OTHER_FIELDS = [field for field in fields(LoraConfig) if field.name not in FREE]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A model, an adapter of it, and what its configuration says."""
    model = tmp_path_factory.mktemp("adapter") / "model"
    hf_model("qwen3").save_pretrained(model)
    adapter = save_adapter(model, init=True)
    return model, adapter, json.loads((adapter / ADAPTER_CONFIG).read_text())


def problems_with(adapter: tuple[Path, Path, dict[str, Any]], **changed: Any) -> list[str]:
    model, folder, said = adapter
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said | changed))
    return read_adapter(model, folder)[0]


def test_every_other_field_of_an_adapter_is_refused_where_it_is_set(adapter: Any) -> None:
    defaults = {field.name: field.default for field in OTHER_FIELDS} | {"a_field_of_tomorrow": None}
    for name, default in defaults.items():
        for value in [3, "loftq", {"0": 4}, *([] if default in (None, MISSING) else [[default]])]:
            found = problems_with(adapter, **{name: value})
            assert any(problem.startswith(f"{name} in ") for problem in found), (name, value)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"target_modules": ["q_proj"]}, "target_modules or exclude_modules in adapter_config.json leave out"),
        ({"target_modules": ["proj"]}, "leave out"),
        ({"target_modules": r".*\.(q|k)_proj"}, "leave out"),
        ({"exclude_modules": ["v_proj"]}, "leave out"),
        ({"target_modules": "all-linear"}, None),
        ({"target_modules": r".*\.(q|v)_proj", "exclude_modules": "lm_head"}, None),
    ],
)
def test_targets_are_peft_s_own(adapter: Any, said: dict[str, Any], word: str | None) -> None:
    problems = problems_with(adapter, **said)
    assert [word] == [problem[problem.index(word) :][: len(word)] for problem in problems] if word else not problems


def test_an_adapter_without_alpha_has_peft_s_default(adapter: Any) -> None:
    model, folder, said = adapter
    assert not problems_with((model, folder, {k: v for k, v in said.items() if k != "lora_alpha"}))  # 8, the run's
    assert "lora_alpha" in problems_with(adapter, lora_alpha=None)[0]


@pytest.mark.parametrize(
    ("base", "path", "is_named"),
    [
        ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/0123456789", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main", False),
        ("/old/place/Qwen3-8B/", "/models/Qwen3-8B", False),
        ("Qwen/Qwen3-8B", "/models/Qwen3-4B", True),
        (None, "/models/Qwen3-4B", False),
    ],
)
def test_an_adapter_of_another_base_is_named(tmp_path: Path, base: str | None, path: str, is_named: bool) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": base}))
    text = adapter_warning(LoraSection(rank=4, alpha=8.0, adapter_path=str(tmp_path)), path)
    assert (text is not None and str(base) in text and path in text) == is_named


def test_an_adapter_beside_a_whole_model_is_refused_where_it_is_not_applied(model: Path) -> None:
    adapter = save_adapter(model, init=True)
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, model)
    (problem,) = model_problems(model, ModelConfig.from_hf(model))
    assert str(model / ADAPTER_CONFIG) in problem and "would not be applied" in problem
    assert model_problems(model, ModelConfig.from_hf(model), str(adapter))  # another one
    assert not model_problems(model, ModelConfig.from_hf(model), str(model))
    with pytest.raises(CheckpointError, match="would not be applied"):
        HfDir(model)


@pytest.mark.parametrize("read", [HfDir, lambda path: next(iter_weights(path))])
def test_a_stored_head_of_a_tied_model_must_be_its_embedding(model: Path, read: Any) -> None:
    embedding = load_file(model / SINGLE)[EMBED]
    rewrite(model, lm_head__weight=embedding.clone())
    read(model)
    for other in (embedding + torch.eye(*embedding.shape), embedding[:-1], embedding.half()):
        rewrite(model, lm_head__weight=other)
        with pytest.raises(CheckpointError, match="tie_word_embeddings, but the stored lm_head"):
            read(model)


@pytest.mark.parametrize("has_shards", [True, False])
def test_a_whole_file_wins_over_an_index_as_in_transformers(model: Path, has_shards: bool) -> None:
    old = hf_model("qwen3")
    old.model.norm.weight.data.mul_(2)
    old.save_pretrained(model.parent / "old", max_shard_size="300KB")
    shutil.copy(model.parent / "old" / INDEX, model)
    left = sorted((model.parent / "old").glob("model-*.safetensors")) if has_shards else []
    for shard in left:
        shutil.copy(shard, model)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert torch.equal(dict(iter_weights(model))[NORM], theirs.model.norm.weight)
    (warning,) = model_warnings(model)
    assert "model.safetensors, as transformers does" in warning and INDEX in warning
    assert all(shard.name in warning for shard in left)
    (model.parent / "old" / "model-00001-of-00099.safetensors").write_bytes(b"")
    (warning,) = model_warnings(model.parent / "old")
    assert warning.endswith("not read, and perhaps of an older model: model-00001-of-00099.safetensors")


def test_an_index_of_the_one_file_is_not_a_stale_one(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / SINGLE), SINGLE)}))  # mlx-lm
    assert not model_warnings(model)


def test_a_field_that_cannot_be_computed_is_named_with_its_file(model: Path) -> None:
    edit_json(model / "config.json", final_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match=f"{model / 'config.json'}: final_logit_softcapping = 30.0"):
        ModelConfig.from_hf(model)


@pytest.mark.parametrize(("dtype", "word"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8")])
def test_tensors_without_their_scales_are_refused_by_type(model: Path, dtype: torch.dtype, word: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(model, **{name.replace(".", "__"): load_file(model / SINGLE)[name].to(dtype)})
    (problem,) = model_problems(model, ModelConfig.from_hf(model))
    assert f"{name} is stored as {word}; only F32, BF16, F16, F64 can be read" in problem
    with pytest.raises(CheckpointError, match=word):
        next(iter_weights(model))


def test_marks_of_quantized_weights_and_other_forms_are_named(model: Path) -> None:
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "hf_quant_config.json says that the weights are quantized" in model_problems(model, None)[0]
    (model / "hf_quant_config.json").unlink()
    (model / SINGLE).rename(model / "consolidated.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"")
    (problem,) = model_problems(model, ModelConfig.from_hf(model))
    assert "has neither model.safetensors nor" in problem
    assert "consolidated.safetensors, pytorch_model.bin is not read" in problem


def test_what_the_index_does_not_say_of_a_shard_is_named(model: Path) -> None:
    hf_model("qwen3").save_pretrained(model, max_shard_size="100KB")
    (model / SINGLE).unlink(missing_ok=True)
    about = json.loads((model / INDEX).read_text())
    file = about["weight_map"][NORM]
    edit_json(model / INDEX, weight_map=about["weight_map"] | {"model.extra": file})
    with pytest.raises(CheckpointError, match=f"in the index but not in {file}: model.extra"):
        next(iter_weights(model))
    del about["weight_map"][NORM]
    edit_json(model / INDEX, weight_map=about["weight_map"])
    with pytest.raises(CheckpointError, match=f"holds tensors that the index does not give it: {NORM}"):
        next(iter_weights(model))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_the_prefix_of_another_program_s_names_is_named(model: Path, prefix: str) -> None:
    tensors = load_file(model / SINGLE)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, model / SINGLE)
    with pytest.raises(CheckpointError, match=f"all begin with '{prefix}' there"):
        next(iter_weights(model))
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, model / SINGLE)
    with pytest.raises(CheckpointError, match=r"without 'model\.' there"):
        next(iter_weights(model))


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_the_prefix_of_nemo_s_names_is_named(model: Path, prefix: str) -> None:
    config = ModelConfig.from_hf(model)
    state = naive_megatron(hf_model("qwen3"), config.vocab_size)
    save_foreign(model.parent / "megatron", {prefix + name: tensor for name, tensor in state.items()})
    with pytest.raises(CheckpointError, match=f"missing: embedding.*all begin with '{prefix}' there"):
        TorchDistReader(model.parent / "megatron").check(config)


@pytest.mark.parametrize(
    ("kernels", "name", "row", "value"),
    [
        ("native", NORM, 0, math.nan),
        ("native", EMBED, 130, math.nan),
        ("native", "model.layers.0.self_attn.k_proj.weight", 0, math.inf),
        ("torch", NORM, 0, math.inf),
    ],
)
def test_logits_that_are_not_finite_end_generation(
    model: Path, tmp_path: Path, kernels: Any, name: str, row: int, value: float
) -> None:
    weights = load_file(model / SINGLE)
    weights[name].view(weights[name].shape[0], -1)[row, 0] = value
    rewrite(model, **{name.replace(".", "__"): weights[name]})
    section = RolloutSection(kernels=kernels)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=4)
        with pytest.raises(BackendError, match="logits are not finite"):
            generate_alone(model, [Prompt(0, "a", (5, 6), "")], tmp_path / "out.jsonl", params, rollout=section)
    assert not (tmp_path / "out.jsonl").exists()

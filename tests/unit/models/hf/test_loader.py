"""Model directories: streaming in, atomic out, and errors that name what is wrong."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_models import MOE_FAMILIES, hf_model, model_config, named_weights, random_weights

CONFIG = ModelConfig("qwen2", 50, 32, 2, 4, 2, 8, 48, qkv_bias=True, tie_word_embeddings=True)


def stored(directory) -> dict[str, torch.Tensor]:
    return dict(iter_weights(directory))


@pytest.mark.parametrize("limit", [1 << 30, 8000])
def test_round_trip_single_and_sharded(limit: int, tmp_path) -> None:
    weights = random_weights(CONFIG)
    save_hf(tmp_path, CONFIG, iter(weights), max_shard_bytes=limit)
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit == 8000)
    back = stored(tmp_path)
    assert list(back) == [n for n, _ in weights]
    assert all(torch.equal(back[n], w) for n, w in weights)
    assert not list(tmp_path.glob(".saving-*"))


def test_saving_again_replaces_shards_and_keeps_the_tokenizer(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(tmp_path, CONFIG, random_weights(CONFIG, 0), max_shard_bytes=8000)
    save_hf(tmp_path, CONFIG, random_weights(CONFIG, 1), dtype=torch.bfloat16)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert stored(tmp_path)["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("limit", [1 << 30, 8000])
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_that_the_umask_gives(umask: int, limit: int, tmp_path) -> None:
    before = os.umask(umask)
    try:
        save_hf(tmp_path, CONFIG, random_weights(CONFIG), max_shard_bytes=limit)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_failed_save_leaves_the_old_model(tmp_path) -> None:
    save_hf(tmp_path, CONFIG, random_weights(CONFIG, 0))
    with pytest.raises(CheckpointError, match="missing"):
        save_hf(tmp_path, CONFIG, random_weights(CONFIG, 1)[:-1])
    assert torch.equal(stored(tmp_path)["model.norm.weight"], dict(random_weights(CONFIG, 0))["model.norm.weight"])
    with pytest.raises(CheckpointError, match="shape"):
        save_hf(tmp_path, CONFIG, [("model.norm.weight", torch.zeros(3))])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", *MOE_FAMILIES])
def test_transformers_and_we_read_each_other(family: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = hf_model(family)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    theirs = stored(tmp_path / "theirs")
    assert all(torch.equal(theirs[n], w) for n, w in named_weights(model))
    assert ModelConfig.from_hf(tmp_path / "theirs") == model_config(model)
    save_hf(tmp_path / "ours", model_config(model), named_weights(model), max_shard_bytes=100_000)
    assert set(weight_files(tmp_path / "ours")) == set(weight_files(tmp_path / "theirs"))  # experts one by one
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto", attn_implementation="eager")
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_errors_name_missing_extra_and_misshapen_tensors(tmp_path) -> None:
    save_hf(tmp_path, CONFIG, random_weights(CONFIG))
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, word in (
        ({name: None}, f"missing: {name}"),
        ({"model.extra.weight": torch.zeros(1)}, r"unexpected: model\.extra\.weight"),
        ({name: torch.zeros(3, 4)}, r"up_proj\.weight has shape \(3, 4\)"),
    ):
        save_file({k: v for k, v in (good | change).items() if v is not None}, file)
        with pytest.raises(CheckpointError, match=word):
            next(iter_weights(tmp_path))


def test_torn_and_absent_files(tmp_path) -> None:
    save_hf(tmp_path, CONFIG, random_weights(CONFIG), max_shard_bytes=8000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=shard.name):
        list(iter_weights(tmp_path))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"missing: {shard.name}"):
        list(iter_weights(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="index"):
        list(iter_weights(tmp_path))
    index.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        list(iter_weights(tmp_path))

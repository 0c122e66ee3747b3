from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.drafter import checkpoint
from megatron_tlt.drafter.checkpoint import load_drafter, save_drafter
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from tests.helpers.tiny_drafters import FAMILIES, random_drafter

CONFIG = FAMILIES["qwen2"]


def test_what_is_saved_is_loaded(tmp_path) -> None:
    weights = random_drafter(CONFIG)
    save_drafter(tmp_path / "d", CONFIG, weights, policy_version=3, trained_steps=70)
    saved = load_drafter(tmp_path / "d", CONFIG)
    assert (saved.policy_version, saved.trained_steps) == (3, 70)
    assert all(torch.equal(saved.weights[n], w) for n, w in weights.items())
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "drafter.safetensors"]
    assert set(load_file(tmp_path / "d" / "drafter.safetensors")) == set(eagle_parameter_shapes(CONFIG))
    about = json.loads((tmp_path / "d" / "config.json").read_text())
    assert about["drafter"] == "eagle"
    assert ModelConfig.from_hf(about).hidden_size == CONFIG.hidden_size


def test_bf16_halves_the_file(tmp_path) -> None:
    save_drafter(tmp_path, CONFIG, random_drafter(CONFIG), dtype=torch.bfloat16)
    assert load_drafter(tmp_path, CONFIG).weights["fc.weight"].dtype == torch.bfloat16


def test_another_policys_drafter_is_refused_by_name(tmp_path) -> None:
    save_drafter(tmp_path, CONFIG, random_drafter(CONFIG))
    with pytest.raises(
        CheckpointError, match=r"mlp\.down_proj\.weight has shape \(64, 96\), the policy needs \(64, 80\)"
    ):
        load_drafter(tmp_path, replace(CONFIG, intermediate_size=80))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is not part"):
        load_drafter(tmp_path, replace(CONFIG, qkv_bias=False))
    with pytest.raises(CheckpointError, match=r"q_norm\.weight is missing"):
        load_drafter(tmp_path, replace(CONFIG, qk_norm=True))


def test_wrong_tensors_are_not_written(tmp_path) -> None:
    weights = random_drafter(CONFIG) | {"lm_head.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not part"):
        save_drafter(tmp_path / "d", CONFIG, weights)
    assert not (tmp_path / "d").exists()


def test_a_crash_leaves_the_old_drafter_or_a_refused_directory(tmp_path, monkeypatch) -> None:
    save_drafter(tmp_path, CONFIG, random_drafter(CONFIG), trained_steps=1)

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(tmp_path, CONFIG, random_drafter(CONFIG, 1), trained_steps=2)
    assert load_drafter(tmp_path, CONFIG).trained_steps == 1
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(tmp_path, CONFIG, random_drafter(CONFIG, 1), trained_steps=2)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_drafter(tmp_path, CONFIG)


def test_other_directories_are_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "nothing", CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(CheckpointError, match=r"describes no drafter; rollouts draft with kind 'eagle'"):
        load_drafter(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text('{"drafter": "eagle"}')
    (tmp_path / "drafter.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors cannot be read"):
        load_drafter(tmp_path, CONFIG)

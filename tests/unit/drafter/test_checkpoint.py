from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.config.load import load_config
from megatron_tlt.drafter.checkpoint import check_drafter, load_drafter, save_drafter
from megatron_tlt.drafter.fingerprint import policy_fingerprint
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from megatron_tlt.models.eagle.eagle3 import Eagle3Config
from tests.helpers.mpi import ROOT
from tests.helpers.tiny_drafters import FAMILIES, random_drafter
from tests.helpers.tiny_eagle3 import POLICIES, random_eagle3

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


def test_a_crash_leaves_the_old_drafter_or_a_refused_directory(tmp_path, monkeypatch) -> None:
    save_drafter(tmp_path, CONFIG, random_drafter(CONFIG), trained_steps=1)

    def fail(*_, **__):
        raise OSError("disk full")

    for name, is_whole in (("save_file", True), ("os.replace", False)):
        with monkeypatch.context() as patch:
            patch.setattr(f"megatron_tlt.drafter.checkpoint.{name}", fail)
            with pytest.raises(CheckpointError, match="cannot be written: disk full"):
                save_drafter(tmp_path, CONFIG, random_drafter(CONFIG, 1), trained_steps=2)
            with pytest.raises(CheckpointError, match="cannot be written: disk full"):
                save_drafter(tmp_path / "new", CONFIG, random_drafter(CONFIG))
        assert not (tmp_path / "new").exists()
        if is_whole:
            assert load_drafter(tmp_path, CONFIG).trained_steps == 1
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_drafter(tmp_path, CONFIG)


def test_other_directories_are_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "nothing", CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(
        CheckpointError, match=r"describes no drafter: drafter = None must be 'eagle' or 'eagle3'"
    ):
        load_drafter(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text('{"drafter": "eagle"}')
    (tmp_path / "drafter.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors is not a readable safetensors file"):
        load_drafter(tmp_path, CONFIG)


def test_eagle3_is_loaded_as_saved_and_refused_for_rollouts(tmp_path) -> None:
    shape = Eagle3Config.of(POLICIES["qwen3"], (0, 2, 6), 40)
    save_drafter(tmp_path, shape, random_eagle3(shape), policy_version=7, trained_steps=30)
    saved = load_drafter(tmp_path)
    assert (saved.shape, saved.policy_version, saved.trained_steps) == (shape, 7, 30)
    assert all(torch.equal(saved.weights[n], w) for n, w in random_eagle3(shape).items())
    with pytest.raises(
        CheckpointError, match=r"describes a drafter of kind 'eagle3'; rollouts .* kind 'eagle' only"
    ):
        check_drafter(tmp_path, shape.policy)


def test_the_demo_drafter_fits_its_policy_and_its_page_shows_the_measurement() -> None:
    folder, policy = ROOT / "assets" / "demo-drafter", ROOT / "assets" / "demo-policy"
    saved = load_drafter(folder, ModelConfig.from_hf(policy))
    recipe = load_config(ROOT / "configs" / "drafter-demo.yaml")
    assert saved.trained_steps == recipe.drafter.num_steps
    assert saved.fingerprint == policy_fingerprint(policy)
    assert recipe.model.path == "assets/demo-policy"
    measured = json.loads((folder / "eval.json").read_text())
    page = (folder / "README.md").read_text()
    for position in (1, 2, 4, 8):
        row = [measured[k][position - 1] for k in ("overlap", "coupled", "p_argmax_q", "p_top4_q")]
        assert "| " + " | ".join([str(position), *(f"{x:.3f}" for x in row)]) + " |" in page
    assert f"{measured['accepted_length']:.1f} are accepted" in page

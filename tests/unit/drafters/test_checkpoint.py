from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.load import load_config
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.mpi import ROOT
from tests.helpers.tiny_drafters import DEEP, FAMILIES, random_drafter

CONFIG = FAMILIES["qwen2"]


def test_a_crash_leaves_the_old_drafter_or_a_refused_directory(tmp_path, monkeypatch) -> None:
    save_drafter(tmp_path, EagleConfig.of(CONFIG), random_drafter(CONFIG), trained_steps=1)

    def fail(*_, **__):
        raise OSError("disk full")

    for name, is_whole in (("models.hf.writer.save_file", True), ("observe.files.os.replace", False)):
        with monkeypatch.context() as patch:
            patch.setattr(f"megatron_tlt.{name}", fail)
            with pytest.raises(CheckpointError, match="cannot be written: disk full"):
                save_drafter(tmp_path, EagleConfig.of(CONFIG), random_drafter(CONFIG, 1), trained_steps=2)
            with pytest.raises(CheckpointError, match="cannot be written: disk full"):
                save_drafter(tmp_path / "new", EagleConfig.of(CONFIG), random_drafter(CONFIG))
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
        CheckpointError, match=r"describes no drafter: drafter = None must be 'eagle' or 'eagle3' or 'dspark'"
    ):
        load_drafter(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text('{"drafter": "eagle"}')
    (tmp_path / "drafter.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"drafter\.safetensors cannot be read"):
        load_drafter(tmp_path, CONFIG)


def test_eagle3_is_loaded_as_saved_and_only_where_it_is_wanted(tmp_path) -> None:
    layer = replace(DEEP["qwen3"], num_kv_heads=2, rope_theta=500.0)
    shape = Eagle3Config.of(DEEP["qwen3"], (0, 2, 6), 40, layer, norm_before_residual=True)
    save_drafter(tmp_path, shape, random_drafter(shape), policy_version=7, trained_steps=30)
    saved = load_drafter(tmp_path)
    assert (saved.config, saved.policy_version, saved.trained_steps) == (shape, 7, 30)
    assert all(torch.equal(saved.weights[n], w) for n, w in random_drafter(shape).items())
    for wanted, error in (
        ({"drafter": "eagle"}, "has drafter = eagle3, but rollout.speculation.drafter = eagle"),
        ({"drafter": "eagle3", "layers": (1, 3, 4)}, r"has layers = \(0, 2, 6\), but .*.layers = \(1, 3, 4\)"),
        ({"drafter": "eagle3", "draft_vocab_size": 30}, "has draft_vocab_size = 40, but .*.draft_vocab_size = 30"),
    ):
        with pytest.raises(CheckpointError, match=error):
            load_drafter(tmp_path, shape.policy, SpeculationSection(**wanted))
    load_drafter(tmp_path, shape.policy, SpeculationSection(drafter="eagle3", draft_vocab_size=40))


def test_every_kind_of_the_configuration_is_an_object_of_that_name() -> None:
    assert {name: kind.facts for name, kind in KINDS.items()} == DRAFTERS


def test_the_demo_drafter_fits_its_policy_and_its_page_shows_the_measurement() -> None:
    folder, policy = ROOT / "assets" / "demo-drafter", ROOT / "assets" / "demo-policy"
    saved = load_drafter(folder, ModelConfig.from_hf(policy))
    recipe = load_config(ROOT / "configs" / "drafter-demo.yaml")
    assert saved.trained_steps == recipe.drafter.num_steps
    assert saved.fingerprint == policy_fingerprint(policy)
    assert recipe.model.path == str(policy)
    measured = json.loads((folder / "eval.json").read_text())
    page = (folder / "README.md").read_text()
    for position in (1, 2, 4, 8):
        row = [measured[k][position - 1] for k in ("overlap", "coupled")]
        assert "| " + " | ".join([str(position), *(f"{x:.3f}" for x in row)]) + " |" in page
    assert f"{measured['accepted_length']:.1f} are accepted" in page

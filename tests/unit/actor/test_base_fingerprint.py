"""The base of adapters and its descendants, which have its embedding, have different fingerprints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.actor.hf_names import Slot
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_models import TINY, moe_config, random_weights

CHANGED = {
    "o_proj": (TINY, "model.layers.0.self_attn.o_proj.weight"),
    "experts": (moe_config("qwen3_moe", 51), "model.layers.1.mlp.experts.down_proj"),
}


def saved(folder: Path, config: ModelConfig, changed: str = "", **options: object) -> Path:
    """Random weights; those of `changed` are others."""
    weights = ((name, w + 0.1 if name == changed else w) for name, w in random_weights(config))
    save_hf(folder, config, weights, **options)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("which", CHANGED)
@pytest.mark.parametrize("in_megatron", [False, True])
def test_another_matrix_is_another_base_and_another_type_is_not(tmp_path: Path, which: str, in_megatron: bool) -> None:
    config, name = CHANGED[which]

    def found(folder: str, **options: object) -> str:
        path = saved(tmp_path / folder, config, **options)  # type: ignore[arg-type]
        if in_megatron:
            MegatronConversion.plan(path, None).write(tmp_path / f"{folder}-mg", SingleProcess())
        section = ModelSection(path=str(path), megatron_path=f"{path}-mg" if in_megatron else None, max_context=64)
        return base_fingerprint(section, config)

    base, other = found("base"), found("other", changed=name)
    embedding = "" if in_megatron else policy_fingerprint(tmp_path / "base")
    assert policy_fingerprint(tmp_path / "other") == policy_fingerprint(tmp_path / "base")
    assert base != other and [text.partition("-")[0] for text in (base, other)] == [embedding] * 2
    assert found("bf16", dtype=torch.bfloat16) == base


def test_a_base_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    path = str(tmp_path / "absent")
    for megatron in (None, path):
        assert base_fingerprint(ModelSection(path=path, megatron_path=megatron, max_context=64), TINY) == ""


def test_layers_of_a_megatron_checkpoint_are_read_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, changed in (("base", ""), ("other", CHANGED["o_proj"][1])):
        path = saved(tmp_path / name, TINY, changed)
        MegatronConversion.plan(path, None).write(tmp_path / f"{name}-mg", SingleProcess())
    read, slots = TorchDistReader.read, []

    def counted(reader: TorchDistReader, config: ModelConfig, slot: Slot) -> list[torch.Tensor]:
        slots.append(slot)
        return read(reader, config, slot)

    monkeypatch.setattr(TorchDistReader, "read", counted)
    section = ModelSection(path=str(tmp_path / "base"), megatron_path=str(tmp_path / "base-mg"), max_context=64)
    first, count = base_fingerprint(section, TINY), len(slots)
    assert base_fingerprint(section, TINY) == first and len(slots) == count > 0
    shutil.copytree(tmp_path / "other-mg", tmp_path / "base-mg", dirs_exist_ok=True)
    assert base_fingerprint(section, TINY) != first

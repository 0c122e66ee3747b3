"""What an export says of the weights that a run started from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.checkpoint import export
from megatron_tlt.checkpoint.export import write_adapter, write_hf
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.checkpoint import drafter_entries
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.state_file import DRAFTER_STATE, drafter_state_writer
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_drafters import CONFIG, random_drafter
from tests.helpers.tiny_models import random_tensors


def test_a_trained_model_keeps_entries_of_config_json_that_are_not_known(tmp_path: Path) -> None:
    """Of `sft` as of `export`."""
    weights = [*random_tensors(CONFIG.parameter_shapes())]
    save_hf(tmp_path / "model", CONFIG, weights)
    about = json.loads((tmp_path / "model/config.json").read_text()) | {"new": [1], "architectures": ["Own"]}
    (tmp_path / "model/config.json").write_text(json.dumps(about))
    policy, world = SimpleNamespace(config=CONFIG, named_weights=lambda: weights), SimpleNamespace(is_main=True)
    world.wait_for_all = lambda: None
    write_hf(policy, world, ModelSection(path=str(tmp_path / "model")), tmp_path / "out", "bf16")  # type: ignore[arg-type]
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == about | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("in_megatron", [False, True])
def test_adapters_and_drafter_belong_to_the_weights_that_the_run_started_from(
    in_megatron: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With model.megatron_path not to those of model.path; the text names the base then."""
    save_hf(tmp_path / "model", CONFIG, random_tensors(CONFIG.parameter_shapes()))
    about = {"about": drafter_entries(EagleConfig.of(CONFIG)), "trained_steps": 3, "model": random_drafter(CONFIG)}
    drafter_state_writer(about)(tmp_path / DRAFTER_STATE)
    monkeypatch.setattr(export, "read_manifest", lambda _: SimpleNamespace(policy_version=7))
    monkeypatch.setattr(export, "TorchDistReader", lambda path: SimpleNamespace(directory=path))
    monkeypatch.setattr(export.AdaptedReader, "check", lambda *_: None)
    model = ModelSection(path=str(tmp_path / "model"), megatron_path="megatron/tuned" if in_megatron else None)
    out = tmp_path / "out"
    said = write_adapter(tmp_path, SingleProcess(), model, out, "fp32", LoraSection(rank=2))
    base = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    made_for = json.loads((out / "drafter/config.json").read_text())["policy_fingerprint"]["embedding"]
    assert (base, bool(made_for)) == ((None, False) if in_megatron else (model.path, True))
    text = "; the base is megatron/tuned: tools/convert_megatron_to_hf.py writes it" if in_megatron else ""
    assert said == f"policy version 7, drafter in {out / 'drafter'}{text}"

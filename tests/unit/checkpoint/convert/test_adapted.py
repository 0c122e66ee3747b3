"""What an exported adapter says of its base."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.checkpoint.convert.adapted import AdaptedReader
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.models.hf.peft import ADAPTER_CONFIG
from tests.helpers.tiny_models import TINY

COMMIT = 40 * "0"


HUB = f"/cache/models--Qwen--Qwen3-8B/snapshots/{COMMIT}"


@pytest.mark.parametrize(
    ("path", "megatron_path", "base", "revision"),
    [
        (HUB, None, "Qwen/Qwen3-8B", COMMIT),
        ("/models/Qwen3-8B", None, "/models/Qwen3-8B", None),
        ("models/Qwen3-8B", None, os.path.abspath("models/Qwen3-8B"), None),
        (HUB, "/models/tuned", None, None),  # other weights than those of the name
    ],
)
def test_a_base_of_the_hub_has_its_name_there_and_another_its_absolute_path(
    tmp_path: Path, path: str, megatron_path: str | None, base: str | None, revision: str | None
) -> None:
    checkpoint: Any = SimpleNamespace(directory=tmp_path)
    reader = AdaptedReader(checkpoint, ModelSection(path=path, megatron_path=megatron_path), LoraSection(rank=2))
    reader.write_peft(tmp_path, TINY, torch.float32)
    said = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == (base, revision)

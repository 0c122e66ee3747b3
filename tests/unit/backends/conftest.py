from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_models import TINY, random_weights


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy TINY in files."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(folder, TINY, random_weights(TINY))
    return folder

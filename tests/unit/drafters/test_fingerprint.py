"""A drafter carries a fingerprint of its policy, and a drafter of another one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.checkpoint import drafter_problems, drafter_warnings, load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_drafters import FAMILIES, random_drafter
from tests.helpers.tiny_models import random_weights

CONFIG = FAMILIES["qwen3"]


def policy(folder: Path, seed: int = 0, **options) -> Path:
    save_hf(folder, CONFIG, random_weights(CONFIG, seed), **options)
    return folder


def problems(drafter: Path, model: Path, **options) -> list[str]:
    section = SpeculationSection(drafter="eagle", drafter_path=str(drafter), **options)
    return [str(p) for p in drafter_problems(section, CONFIG, model)]


@pytest.fixture
def drafter(tmp_path) -> Path:
    """A drafter of the policy in `mine`."""
    made_for = policy_fingerprint(policy(tmp_path / "mine"))
    save_drafter(tmp_path / "drafter", EagleConfig.of(CONFIG), random_drafter(CONFIG), fingerprint=made_for)
    assert load_drafter(tmp_path / "drafter").fingerprint == made_for
    return tmp_path / "drafter"


def test_weights_count_and_the_type_and_the_sharding_of_files_do_not(tmp_path) -> None:
    mine = policy_fingerprint(policy(tmp_path / "mine"))
    assert len(mine) == 16
    for name, options in (("bf16", {"dtype": torch.bfloat16}), ("shards", {"max_shard_bytes": 30_000})):
        assert policy_fingerprint(policy(tmp_path / name, **options)) == mine
    assert policy_fingerprint(policy(tmp_path / "trained", seed=1)) not in ("", mine)
    (tmp_path / "mine" / "model.safetensors").unlink()  # a run may start from `model.megatron_path`
    assert policy_fingerprint(tmp_path / "mine") == ""


def test_a_drafter_of_another_policy_is_refused_unless_asked_for(tmp_path, drafter) -> None:
    assert problems(drafter, tmp_path / "mine") == []
    trained = policy(tmp_path / "trained", seed=1)
    (problem,) = problems(drafter, trained)
    assert problem.startswith(f"rollout.speculation.drafter_path = {str(drafter)!r}: was made for a policy")
    assert "with another embedding than" in problem and "rollout.speculation.allow_other_policy=true" in problem
    assert problems(drafter, trained, allow_other_policy=True) == []
    (trained / "drafter").mkdir()  # as `export` leaves it
    assert f"than {trained} ({trained / 'drafter'} is that policy's);" in problems(drafter, trained)[0]


def test_what_is_not_known_is_not_compared(tmp_path, drafter) -> None:
    """Policies without weights beside their config.json, and drafters of earlier versions."""
    bare = tmp_path / "bare"
    shutil.copytree(tmp_path / "mine", bare)
    (bare / "model.safetensors").unlink()
    section = SpeculationSection(drafter="eagle", drafter_path=str(drafter))
    assert problems(drafter, bare) == [] and drafter_warnings(section, CONFIG) == []
    about = json.loads((drafter / "config.json").read_text())
    del about["policy_fingerprint"]
    (drafter / "config.json").write_text(json.dumps(about))
    assert problems(drafter, policy(tmp_path / "other", seed=1)) == []
    (warning,) = drafter_warnings(section, CONFIG)
    assert "has nothing of the policy that it was made for: not checked" in warning

"""The drafter in assets/ fits the policy beside it and says what it was measured to do."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_tlt.config.load import load_config
from megatron_tlt.drafter.checkpoint import load_drafter
from megatron_tlt.models.config import ModelConfig

ROOT = Path(__file__).parents[3]
DRAFTER = ROOT / "assets" / "demo-drafter"


def test_it_fits_the_demo_policy_and_its_recipe() -> None:
    saved = load_drafter(DRAFTER, ModelConfig.from_hf(ROOT / "assets" / "demo-policy"))
    recipe = load_config(ROOT / "configs" / "drafter-demo.yaml")
    assert saved.trained_steps == recipe.drafter.num_steps
    assert recipe.model.path == "assets/demo-policy"


def test_the_page_shows_the_measurement() -> None:
    measured = json.loads((DRAFTER / "eval.json").read_text())
    page = (DRAFTER / "README.md").read_text()
    for position in (1, 2, 4, 8):
        row = [measured[k][position - 1] for k in ("overlap", "coupled", "p_argmax_q", "p_top4_q")]
        assert "| " + " | ".join([str(position), *(f"{x:.3f}" for x in row)]) + " |" in page
    assert f"{measured['accepted_length']:.1f} are accepted" in page

"""The quickstart with a block drafter that starts from the policy: the same bits as without speculation."""

from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT, run_ranks
from tests.helpers.runs import assert_same_training, rows

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SMALL = ("train.num_steps=2", "train.prompts_per_step=8", "eval.every=0", "checkpoint.every=2")
OFF = ("rollout.speculation.drafter=none", "idle.train_drafter=false")
ON = (
    "rollout.speculation.drafter=dspark",
    "rollout.speculation.selector=fixed",  # cost_model does not draft with one that knows so little
    "idle.min_steps_per_window=2",
)


def test_the_quickstart_trains_the_same_bits_with_a_block_drafter(tmp_path: Path) -> None:
    for name, options in {"off": OFF, "on": ON}.items():
        given = (f"train.run_dir={tmp_path / name}", "rollout.speculation.drafter_path=null", *SMALL, *options)
        run_ranks(2, ["-m", "megatron_tlt", "train"], str(ROOT / "configs/quickstart.yaml"), *given, timeout=600)
    assert_same_training(tmp_path / "off", tmp_path / "on", 2)
    for row in rows(tmp_path / "on"):
        assert row["spec/accept_length"] > 1, "the drafter drafts"
        assert row["drafter/steps"] > 0 and row["drafter/disabled"] == 0, "idle time trained it"

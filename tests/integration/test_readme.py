"""README, "Your own run" and "Your own model": files and commands as printed, on the demo policy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.columns import undocumented_of
from tests.helpers.mpi import ROOT
from tests.helpers.runs import commands, make_folder, rows, run_as_printed

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]


def section(heading: str) -> str:
    """The text of one section of the README."""
    return (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def write_files(folder: Path, text: str) -> list[str]:
    """Writes the fenced blocks of `text` whose first line is `# NAME` into `folder`. Returns the names."""
    files = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for name, content in files:
        (folder / name).write_text(content)
    return [name for name, _ in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory like the repository, after the commands."""
    folder = make_folder(tmp_path_factory.mktemp("readme"))
    # As the section says for trying it out. A random model never gets a reward, and so would not learn.
    shutil.copytree(ROOT / "assets/demo-policy", folder / "my-model")
    run_as_printed(folder, commands(section("Your own model")))
    return folder


def test_the_printed_configuration_trains_with_the_printed_reward(tmp_path: Path):
    text = section("Your own run")
    folder = make_folder(tmp_path)
    assert write_files(folder, text) == ["my_reward.py", "my_run.yaml"]
    run_as_printed(folder, commands(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)))
    steps = rows(folder / "runs/mine")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert undocumented_of(steps) == [], "columns that docs/reference/metrics.md does not have"
    assert all(0 < row["reward/mean"] <= 1 and row["reward/failures"] == 0 for row in steps)
    assert (folder / "mine.html").stat().st_size > 0


def test_the_trained_directory_is_a_model_that_has_learned(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(folder / n) for n in ("my-model", "my-model-trained"))
    trained = dict(after.named_parameters())
    assert any(not torch.equal(p, trained[name]) for name, p in before.named_parameters())
    assert AutoTokenizer.from_pretrained(folder / "my-model-trained").vocab_size > 0
    steps = rows(folder / "runs/my-model")
    assert [row["step"] for row in steps] == [1, 2]
    peaks = {name for name in steps[-1] if name.startswith("memory/")}
    assert {f"memory/{phase}_peak_mib" for phase in ("rollout", "update", "weight_sync")} <= peaks
    assert all(100 < steps[-1][name] < 20_000 for name in peaks)  # MiB of a process with torch in it

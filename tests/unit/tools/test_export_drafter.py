"""The command: exit codes, what it prints, and that the page's commands are the tool's."""

from __future__ import annotations

import re
import shlex

import export_drafter
import pytest

from megatron_tlt.drafters.base import FORMATS
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.mpi import ROOT
from tests.helpers.tiny_drafters import FAMILIES, random_drafter


@pytest.fixture
def drafter(tmp_path):
    save_drafter(tmp_path / "d", EagleConfig.of(FAMILIES["qwen2"]), random_drafter(FAMILIES["qwen2"]))
    return tmp_path / "d"


def test_written_files_are_listed(drafter, tmp_path, capsys) -> None:
    arguments = ["--drafter", str(drafter), "--format", "sglang", "--out", str(tmp_path / "out")]
    assert export_drafter.main(arguments) == 0
    said = capsys.readouterr().out
    for file in (tmp_path / "out").iterdir():
        assert str(file) in said
    assert "13 tensors" in said and "bf16" in said
    assert export_drafter.main(arguments) == 2
    assert "exists" in capsys.readouterr().err


def test_the_pages_commands_run_on_the_demo_drafter(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "guides" / "export_drafter.md").read_text()
    lines = re.findall(r"^    \.venv/bin/python tools/export_drafter\.py (.*--drafter assets.*)$", page, re.MULTILINE)
    assert len(lines) == 2
    codes = [export_drafter.main(shlex.split(line.replace("runs/", f"{tmp_path}/"))) for line in lines]
    assert codes == [0, 2] and [path.name for path in tmp_path.iterdir()] == ["demo-hf"]
    said = capsys.readouterr().err.strip().removeprefix("export_drafter: ")
    assert said in " ".join(page.split())
    about = ModelConfig.from_hf(tmp_path / "demo-hf")
    assert load_drafter(tmp_path / "demo-hf", about).trained_steps == 1800
    assert all(f in page for f in FORMATS)

"""Where a training may write its output."""

import shutil

import pytest

from megatron_tlt.cli.main import main
from megatron_tlt.config.checks.files import note_maker, output_directory_problems
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import SftConfig
from megatron_tlt.trainer.preflight import place_problems
from tests.helpers.mpi import ROOT

QUICKSTART, SFT = str(ROOT / "configs/quickstart.yaml"), str(ROOT / "configs/sft-demo.yaml")
COMMANDS = {
    "sft": ["check", SFT, "--sft", "sft.out=OUT"],
    "drafter train": ["drafter", "train", QUICKSTART, "--out", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_training_replaces_a_finished_one_where_it_begins_anew_only(command, tmp_path, capsys, monkeypatch):
    """Before, another configuration's model was replaced without a word."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    shutil.copytree("assets/demo-policy", out)
    note_maker(out, command)
    assert main([word.replace("OUT", str(out)) for word in COMMANDS[command]]) == 2
    said = f"= '{out}': holds what `{command}` has finished: name another directory; checkpoint.resume=never replaces"
    assert said in capsys.readouterr().err
    if command == "sft":
        assert not place_problems(load_config(SFT, [f"sft.out={out}", "checkpoint.resume=never"], SftConfig))
    (out / "unfinished").mkdir()
    assert not output_directory_problems("--out", out, command, replaces=False), "it goes on"

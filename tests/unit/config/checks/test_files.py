"""Where a training may write its output."""

import shutil

import pytest

from megatron_tlt.cli.main import main
from megatron_tlt.config.checks.files import MOUNTS, note_maker, output_directory_problems, output_file_problems
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


def test_in_a_container_only_its_mounts_are_written_to(tmp_path, monkeypatch):
    """What lies elsewhere is lost when the job ends: a requeued run would begin anew each time."""
    monkeypatch.setenv(MOUNTS, f"{tmp_path}/a:{tmp_path}/b")
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("b")
    for place in (tmp_path / "a/run", tmp_path / "a", tmp_path / "link/x/run"):
        assert not output_directory_problems("train.run_dir", place, "train")
    said = "lies in the container and is lost when the job ends: mount a directory above it, as "
    said += f"MOUNTS={tmp_path}:{tmp_path}"
    for place in (tmp_path / "run", tmp_path / "ab", tmp_path / "a/../run"):
        (problem,) = output_directory_problems("train.run_dir", place, "train", must_be_writable=False)
        assert (problem.path, problem.value) == ("train.run_dir", str(place))
        assert problem.allowed == said
    (problem,) = output_file_problems("--out", tmp_path / "o.json", b"")
    assert problem.allowed == said

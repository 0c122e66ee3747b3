"""Relative paths: of a YAML file from that file, of the command line from the working directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import SftConfig
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError

ROOT = Path(__file__).parents[3]
RUN = """
defaults: [{root}/configs/quickstart.yaml]
model: {{path: policy, tokenizer: owner/name}}
data: {{train: {{kind: jsonl, path: rows/train.jsonl, tasks: []}}}}
rewards:
  functions: [{{name: python, path: "mine.py:reward"}}, {{name: python, path: "package.mine:reward"}}]
checkpoint: {{resume: never}}
train: {{run_dir: runs/mine}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A configuration of one's own in a directory of its own, with every file that it names."""
    (tmp_path / "own/rows").mkdir(parents=True)
    (tmp_path / "own/rows/train.jsonl").touch()
    (tmp_path / "own/policy").mkdir()
    (tmp_path / "own/mine.py").touch()
    file = tmp_path / "own/run.yaml"
    file.write_text(RUN.format(root=ROOT))
    return file


def test_paths_in_a_file_count_from_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("own/run.yaml")
    assert config.model.path == "own/policy"
    assert config.data.train.path == "own/rows/train.jsonl"
    assert [function.path for function in config.rewards.functions] == ["own/mine.py:reward", "package.mine:reward"]
    assert config.train.run_dir == "own/runs/mine"
    assert config.checkpoint.resume == "never"
    # Those of the quickstart's file from the quickstart's.
    assert config.rollout.speculation.drafter_path == str(ROOT / "assets/demo-drafter")


def test_paths_of_the_command_line_count_from_the_working_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("own/run.yaml", ["train.run_dir=runs/mine", "data.train.path=x.jsonl"])
    assert (config.train.run_dir, config.data.train.path) == ("runs/mine", "x.jsonl")


def test_a_name_on_the_hub_is_no_path(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("own/run.yaml").model.tokenizer == "owner/name"
    (run.parent / "owner/name").mkdir(parents=True)
    assert load_config("own/run.yaml").model.tokenizer == "own/owner/name"
    shutil.move("own/owner", "owner")
    with pytest.raises(ConfigError, match=r"it is own/owner/name, which does not exist; owner/name does"):
        load_config("own/run.yaml")
    file = tmp_path / "own/other.yaml"
    file.write_text("model: {path: ../owner/missing}\n")
    assert load_config("own/other.yaml").model.path == "./owner/missing", "a path, which is_name must not take"


def test_a_path_that_only_the_working_directory_has_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's directory too: the run would begin anew elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    shutil.move("own/rows/train.jsonl", "rows/train.jsonl")
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        load_config("own/run.yaml")
    assert [problem.path for problem in refused.value.problems] == ["data.train.path", "train.run_dir"]
    text = str(refused.value)
    assert "it is own/rows/train.jsonl, which does not exist; rows/train.jsonl does: write ../rows/train.jsonl" in text
    config = load_config("own/run.yaml", ["data.train.path=rows/train.jsonl", "train.run_dir=runs/mine"])
    assert config.train.run_dir == "runs/mine"


def test_of_two_files_the_other_one_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    notes: list[str] = []
    load_config("own/run.yaml", notes=notes)
    assert notes == [
        "rewards.functions.0.path = own/mine.py:reward: a path in own/run.yaml counts from that file; mine.py is not it"
    ]


def test_a_link_before_two_dots_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`..` behind a link is the parent of what the link names, as everywhere on this system."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far/configs").mkdir(parents=True)
    (tmp_path / "far/policy").mkdir()
    (tmp_path / "configs").symlink_to("far/configs")
    (tmp_path / "configs/run.yaml").write_text("model: {path: ../policy}\n")
    assert Path(load_config("configs/run.yaml").model.path).samefile("far/policy")


@pytest.mark.parametrize("root", ["sft", "sim"])
def test_other_roots_have_the_same_rule(root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if root == "sft":
        assert load_config(ROOT / "configs/sft-demo.yaml", (), SftConfig).sft.out == str(ROOT / "assets/demo-policy")
    else:
        (tmp_path / "far").mkdir()
        text = f"defaults: [{ROOT / 'configs/sim/paper-7b.yaml'}]\nworkload: {{lengths: {{path: lengths.txt}}}}\n"
        (tmp_path / "far/sim.yaml").write_text(text)
        assert load_config(tmp_path / "far/sim.yaml", (), SimConfig).workload.lengths.path == str(
            tmp_path / "far/lengths.txt"
        )


def test_the_home_directory_is_meant_and_variables_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell replaces neither in a YAML file, nor `~` in `train.run_dir=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / "home.yaml"
    home.write_text("defaults: [~/own/run.yaml]\ntrain: {run_dir: ~/runs/x}\n")
    assert load_config(home).train.run_dir == f"{tmp_path}/runs/x"
    assert load_config(home, ["train.run_dir=~/z", "checkpoint.resume=auto"]).train.run_dir == f"{tmp_path}/z"
    for path in ("$SCRATCH/x", "${SCRATCH}/x", "mine/$SCRATCH"):
        with pytest.raises(ConfigError, match=r"train.run_dir = .* has '\$.*variables are not replaced"):
            load_config(home, [f"train.run_dir={path}"])


def test_a_switch_that_yaml_reads_as_text_is_noted(run: Path) -> None:
    notes: list[str] = []
    load_config(run, ["data.chat_template_kwargs={enable_thinking: no, other: false, name: yesterday}"], notes=notes)
    assert len(notes) == 1 and notes[0].startswith("data.chat_template_kwargs.enable_thinking = 'no' is a text")
    load_config(run, ["rewards.functions.0.params.deep=[{strict: Off}]", "rollout.release_cache=no"], notes=notes)
    assert [note.split(" ")[0] for note in notes[1:]] == ["rewards.functions.0.params.deep.0.strict"]

"""Wrong commands as new users type them: refused by name with code 2, and nothing of theirs is changed."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_tlt.cli.export import problems_of
from megatron_tlt.cli.main import main
from megatron_tlt.config.checks.files import note_maker, output_directory_problems
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.yaml_reader import parse_yaml
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer.drafter_training import given_responses
from tests.helpers.mpi import ROOT, rank_environment

pytestmark = pytest.mark.ci

QUICKSTART, SFT = str(ROOT / "configs/quickstart.yaml"), str(ROOT / "configs/sft-demo.yaml")
POLICY = ROOT / "assets/demo-policy"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a downloaded model, a file of notes and prompts, and a run."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(POLICY, tmp_path / "model")
    (tmp_path / "model/made_by.json").unlink()
    (tmp_path / "notes.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (tmp_path / "run").mkdir()
    config = {"model": {"path": str(POLICY)}, "train": {}, "rollout": {}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    return tmp_path


def content(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


DIRECTORIES = {
    "train": ["check", QUICKSTART, "train.run_dir=OUT"],
    "sft": ["check", SFT, "--sft", f"model.path={POLICY}", "sft.out=OUT"],
    "drafter train": ["drafter", "train", QUICKSTART, "--out", "OUT"],
}
FILES = {
    "drafter eval": ["drafter", "eval", QUICKSTART, "--drafter", str(ROOT / "assets/demo-drafter"), "--out", "OUT"],
    "eval": ["eval", QUICKSTART, "--out", "OUT", "--overwrite"],
    "generate": [*(f"generate --model {POLICY} --prompts PLACE/notes.jsonl".split()), "--out", "OUT", "--overwrite"],
    "generate --stats": [*(f"generate --model {POLICY} --prompts p --out o --overwrite".split()), "--stats", "OUT"],
    "report": ["report", "PLACE/run", "-o", "OUT"],
    "timeline": ["timeline", "PLACE/run", "-o", "OUT"],
    "simulate": ["simulate", "configs/sim/paper-7b.yaml", "--out", "OUT"],
    "simulate --report": ["simulate", "configs/sim/paper-7b.yaml", "--report", "OUT"],
}


def refused(command: list[str], place: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The words with which a command on `out` ends, with code 2 and every file as it was."""
    before = content(place)
    words = [word.replace("OUT", str(out)).replace("PLACE", str(place)) for word in command]
    assert main(words) == 2
    assert content(place) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("command", DIRECTORIES)
def test_no_command_writes_into_a_model(command, place, capsys):
    """Before, `drafter train` and `sft` made a directory of two models' files of it."""
    said = refused(DIRECTORIES[command], place, place / "model", capsys)
    assert f"= '{place / 'model'}': holds chat_template.jinja, config.json, generation_config.json, and 3 more" in said
    link = place / "link"
    link.symlink_to("model")
    assert f"= '{link}': " in refused(DIRECTORIES[command], place, link, capsys)
    file = place / "notes.jsonl"
    assert f"= '{file}': " in refused(DIRECTORIES[command], place, file, capsys)


@pytest.mark.parametrize("adapter", [False, True])
def test_an_export_replaces_exports_only(adapter, place):
    def said() -> str:
        problems = problems_of(load_config(QUICKSTART, [f"train.run_dir={place}/r"]), place / "model", True, adapter)
        return next((p.allowed for p in problems if p.path == "--out"), "")

    command = "export --adapter" if adapter else "export"
    assert f"no directory that `{command}` made" in said()
    note_maker(place / "model", "sft")
    assert f"no directory that `{command}` made" in said()
    note_maker(place / "model", command)
    assert not said()


@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize("target", ["notes.jsonl", "model/model.safetensors", "run/config.json"])
def test_no_command_replaces_another_file(command, target, place, capsys):
    said = refused(FILES[command], place, place / target, capsys)
    assert f"= '{place / target}': is not replaced" in said
    assert f"= '{place}': is a directory" in refused(FILES[command], place, place, capsys)


def test_a_command_writes_into_its_own_output_and_into_nothing(tmp_path):
    def problems(command: str) -> list[str]:
        return [p.allowed for p in output_directory_problems("--out", tmp_path, command)]

    commands = ["train", "sft", "drafter train", "export"]
    assert not any(map(problems, commands))
    (tmp_path / "slurm-7.out").write_text("a launcher's")
    (tmp_path / "my.yaml").write_text("a: 1")
    (tmp_path / "checkpoints/lost+found").mkdir(parents=True)  # a disk of its own
    assert not any(map(problems, commands))
    for maker in commands:
        note_maker(tmp_path, maker)
        assert [command for command in commands if not problems(command)] == [maker]


@pytest.mark.parametrize(
    ("lock", "sections", "makers"),
    [
        ("lock", (), ["train"]),
        ("unfinished/lock", ("sft", "model"), ["sft"]),
        ("unfinished/lock", ("train", "rollout", "model"), ["drafter train"]),
        ("unfinished/lock", (), ["train", "sft", "drafter train"]),  # killed before it made anything else
    ],
)
def test_a_stopped_command_goes_on_in_its_own_directory(tmp_path, lock, sections, makers):
    (tmp_path / lock).parent.mkdir(exist_ok=True)
    (tmp_path / lock).touch()
    if sections:
        (tmp_path / "unfinished/config.json").write_text(json.dumps(dict.fromkeys(sections)))
    commands = ["train", "sft", "drafter train"]
    assert [c for c in commands if not output_directory_problems("--out", tmp_path, c)] == makers
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert all(output_directory_problems("--out", tmp_path, c) for c in commands)


def test_outputs_of_before_are_replaced(tmp_path, capsys, monkeypatch):
    """Those that are made again from their inputs, as each command writes them."""
    monkeypatch.chdir(ROOT)
    out, page = tmp_path / "o.json", tmp_path / "p.html"
    command = ["simulate", "configs/sim/paper-7b.yaml", "--out", str(out), "--report", str(page)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "reward/mean": 0.5}\n')
    assert main(command) == 0
    for again, files in ((command, (out, page)), (["report", str(tmp_path), "-o", str(page)], (page,))):
        for file in files:
            file.with_suffix(".old").unlink(missing_ok=True)
            file.with_suffix(".old").hardlink_to(file)
        assert main(again) == 0
        assert not any(file.samefile(file.with_suffix(".old")) for file in files), "written beside it, and renamed"
    out.write_bytes(gzip.compress(b'{"displayTimeUnit":"ms","traceEvents":[\n]}\n'))
    assert main(["timeline", str(tmp_path), "-o", str(out)]) == 2
    assert "has no event logs" in capsys.readouterr().err, "the file is a timeline's"


def test_an_input_is_no_output(place, capsys):
    prompts, out = place / "notes.jsonl", place / "new"
    given = ["generate", "--model", str(POLICY), "--prompts", str(prompts), "--overwrite"]
    assert "this command reads it" in refused([*given, "--out", str(prompts)], place, out, capsys)
    same = [*given, "--out", str(out), "--stats", str(out)]
    assert "must be another file than --out" in refused(same, place, out, capsys)
    drafter = place / "drafter"
    shutil.copytree(ROOT / "assets/demo-drafter", drafter)
    again = ["drafter", "train", QUICKSTART, "--out", str(drafter), "--drafter", str(drafter)]
    assert "it holds what `drafter train` reads" in refused(again, place, out, capsys)
    note_maker(place / "model", "sft")
    tune = ["check", SFT, "--sft", f"model.path={place / 'model'}", f"sft.out={place / 'model'}"]
    assert "it holds what `sft` reads" in refused(tune, place, out, capsys)


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        ("rollout.speculation.draft_vocab_size", 10**6, ("rollout.speculation.drafter_path=null",)),
        ("model.max_context", 10**6, ()),
        ("data.system_prompt", "Think.", ("data.chat_template=false",)),
    ],
)
def test_check_refuses_what_a_start_refuses(field, value, more, capsys, monkeypatch):
    """By the same field, before anything is written."""
    monkeypatch.chdir(ROOT)
    setting = [f"{field}={value}", *more]
    assert main(["check", QUICKSTART, *setting]) == 2
    assert f"{field} = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"), [("a: &a [*a]\n", "within itself"), (f"a: {'[' * 900}{']' * 900}", "nested too deep")]
)
def test_a_file_without_an_end_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_yaml(text, "x.yaml")


def test_links_in_a_circle_are_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "loop")
    (problem,) = output_directory_problems("--out", tmp_path / "loop", "train", [tmp_path / "loop"])
    assert "is not a directory" in problem.allowed


@pytest.mark.mpi
def test_a_refused_start_of_ranks_has_only_its_own_lines(tmp_path):
    """Before, MPI added `Abort(2) on node 1 ..`, a line a rank."""
    run_dir = tmp_path / "run"
    command = [str(ROOT / "launch/local.sh"), "-n", "2", QUICKSTART, f"train.run_dir={run_dir}"]
    command.append("model.max_context=1000000")
    ended = subprocess.run(command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and not run_dir.exists()
    first, second = (ended.stdout + ended.stderr).splitlines()
    assert "1 problem(s)" in first and "model.max_context = 1000000" in second


def test_keys_that_are_no_text_are_unknown_ones():
    with pytest.raises(ConfigError, match="1 = 1: unknown key"):
        build_config({1: 2, "model": {"path": "m"}})


def test_responses_that_are_not_there_name_their_field(place):
    (place / "run/responses").mkdir()
    (place / "empty.jsonl").touch()
    for given in (place / "run", place / "empty.jsonl", place / "nowhere"):
        with pytest.raises(ConfigError, match=r"drafter\.responses_path = "):
            given_responses(load_config(QUICKSTART, [f"drafter.responses_path={given}"]))

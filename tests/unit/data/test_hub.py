"""Names on the hub, against a stand-in for it on the loopback interface and against caches without one."""

from __future__ import annotations

import argparse
import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from megatron_tlt.cli import drafter, evaluate, generate
from megatron_tlt.cli.main import main
from megatron_tlt.config.load import build_config, load_config
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.data import hub_answers
from megatron_tlt.data.hub import fetch_argument, hub_name, is_name, names_of, on_this_machine, with_names
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.state_file import drafter_state_writer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import shape_of
from megatron_tlt.trainer.drafter_training import _STATE, training_settings
from megatron_tlt.trainer.run_record import write_config
from tests.helpers.hub_server import POLICY, ROWS, Hub, Repository, pretend
from tests.helpers.mpi import ROOT

NO_PATH = f"is no path from {Path.cwd()}, and"

ALONE = SingleProcess()


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    rows = "{kind: hf, tasks: [], path: a/rows, subset: main, split: %s}"
    return [
        "model.path=a/policy",
        f"data.train={rows % 'train'}",
        f"data.eval={rows % 'test'}",
        f"train.run_dir={tmp_path / 'run'}",
    ]


def configured(settings: list[str]) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", settings)


def problems_of(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        on_this_machine(configured([*settings]), ALONE)
    assert str(caught.value).count("\n") == len(caught.value.problems) - 1, "one line for each name"
    return str(caught.value)


def test_a_name_has_an_owner_and_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B@refs/pr/1"
    others = "data/train.jsonl", "./models/x", "../x", "/data/x", "a/b/c", "gpt2", "assets/demo-policy"
    assert [value for value in (*names, *others, None) if is_name(value)] == [*names]


def test_only_the_files_that_are_read_are_fetched_and_only_once(hub: Hub, settings: list[str]) -> None:
    local = on_this_machine(configured(settings), ALONE)
    fetched = {line.rpartition("/")[2] for line in hub.fetched("")}
    assert fetched == {*POLICY, "README.md", "train-0.jsonl", "test-0.jsonl"}
    assert {path.name: path.read_bytes() for path in Path(local.model.path).iterdir()} == POLICY
    hub.asked.clear()
    assert on_this_machine(configured(settings), ALONE) == local and not hub.fetched("")


def test_commands_that_read_no_weights_fetch_none(hub: Hub, settings: list[str]) -> None:
    on_this_machine(configured([*settings, "rollout.speculation.drafter_path=no/drafter"]), ALONE, weights=False)
    assert hub.fetched("/tokenizer.json") and not hub.fetched("safetensors") and not hub.fetched("jsonl")
    fetch_argument("--config", Path("a/policy"), ALONE, "companions")
    assert not hub.fetched("safetensors")
    on_this_machine(configured([*settings, "actor.lora.rank=8"]), ALONE, weights=False)
    assert hub.fetched("safetensors") and not hub.fetched("jsonl"), "adapters are merged into their base"
    assert (fetch_argument("--hf", Path("a/policy"), ALONE) / "model.safetensors").is_file()


DRAFTER = {"config.json": b"{}", "README.md": b"1", "mask_embedding.pt": b"2", "pytorch_model.bin": b"3"}


@pytest.mark.parametrize("more", [{}, {"model.safetensors": b"4"}, {"other/model.safetensors": b"4"}])
def test_a_drafter_comes_with_its_mask_and_with_a_pickle_where_there_is_nothing_else(
    hub: Hub, more: dict[str, bytes]
) -> None:
    hub.repositories["models/a/drafter"] = Repository(DRAFTER | more)
    folder = fetch_argument("--drafter", Path("a/drafter"), ALONE, "drafter")
    weights = "model.safetensors" if "model.safetensors" in more else "pytorch_model.bin"
    assert {path.name for path in folder.iterdir()} == {"config.json", "mask_embedding.pt", weights}


@pytest.mark.parametrize("silent", ["/api/", "/resolve/"])
def test_a_silent_hub_is_said_and_not_waited_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], silent: str
) -> None:
    """It accepts connections and never answers: to anything, or to requests for files."""
    for name, seconds in (("SAY_S", 0.1), ("COMMIT_S", 0.3), ("FILES_S", 0.3)):
        monkeypatch.setattr(hub_answers, name, seconds)
    monkeypatch.setattr(hub_answers, "_silent", set())
    hub.silent = silent
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no whole model in the cache .* does not answer"):
            fetch_argument("--model", Path("a/policy"), ALONE)
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert said.count("waits for the hub's answer about --model = a/policy") == 1
    assert said.count("from now on only the cache is read") == 1


def test_a_silent_hub_is_no_matter_where_the_cache_is_whole(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_answers, "_silent", set())
    there = fetch_argument("--model", Path("a/policy"), ALONE)
    monkeypatch.setattr(hub_answers, "SAY_S", 0.1)
    monkeypatch.setattr(hub_answers, "COMMIT_S", 0.3)
    hub.silent = ""
    assert fetch_argument("--model", Path("a/policy"), ALONE) == there
    with pytest.raises(ConfigError, match="does not answer"):
        fetch_argument("--model", Path("a/gated"), ALONE)


def test_every_field_that_takes_a_name_is_known(settings: list[str]) -> None:
    own = ["model.tokenizer=a/t", "rollout.speculation={drafter: eagle, drafter_path: a/d}"]
    fields = {named.field for named in names_of(configured([*settings, *own]))}
    drafter = "rollout.speculation.drafter_path"
    assert fields == {"model.path", "model.tokenizer", drafter, "data.train.path", "data.eval.path"}
    for backend, content in (("embedded", "companions"), ("vllm", "companions"), ("trtllm", "model")):
        start = configured([*settings, "model.megatron_path=mg", f"rollout.backend={backend}"])
        assert names_of(start)[0].content == content, "TensorRT-LLM starts with the weights in model.path"
    files = configured([*settings, "data.eval={kind: jsonl, path: a/rows}"])
    assert "data.eval.path" not in {named.field for named in names_of(files)}
    sft = {"train_path": "a/rows@v1", "eval_path": "a/rows", "out": "o", "subset": "main"}
    config = build_config({"model": {"path": "m"}, "sft": sft}, (), SftConfig)
    found = [(n.field, n.name, n.revision, n.subset, n.split) for n in names_of(config)]
    assert found == [
        ("sft.train_path", "a/rows", "v1", "main", "train"),
        ("sft.eval_path", "a/rows", None, "main", "test"),
    ]


def test_a_run_that_goes_on_uses_the_commits_of_its_first_start(hub: Hub, settings: list[str], tmp_path: Path) -> None:
    local = on_this_machine(configured(settings), ALONE)
    first = {key: repository.commit for key, repository in hub.repositories.items()}
    named = with_names(local)
    assert named.model.path == f"a/policy@{first['models/a/policy']}"
    assert named.data.eval is not None and named.data.eval.path == f"a/rows@{first['datasets/a/rows']}"
    assert hub_name(local.model.path) == ("a/policy", first["models/a/policy"]) and hub_name("a/policy") is None
    assert on_this_machine(named, ALONE) == local
    write_config(local, tmp_path / "run", None, "x86_64")
    for key in hub.repositories:
        hub.repositories[key] = Repository({**hub.repositories[key].files, "config.json": b"{}"})
    again = on_this_machine(configured(settings), ALONE)
    assert (again.model.path, again.data) == (local.model.path, local.data)
    record = tmp_path / "run/config.json"
    first_start = json.loads(record.read_text())
    first_start["data"]["eval"] = None
    record.write_text(json.dumps(first_start))
    again = on_this_machine(configured(settings), ALONE)
    assert again.data == local.data, "a field that is new has the commit of its repository"
    branch = [f"train.run_dir={tmp_path / 'branch'}", f"checkpoint.resume={tmp_path / 'run/checkpoints/step-000001'}"]
    branched = on_this_machine(configured([*settings, *branch]), ALONE)
    assert (branched.model.path, branched.data) == (local.model.path, local.data)
    (tmp_path / "run").rename(tmp_path / "unfinished")  # as a drafter's training has it
    assert on_this_machine(configured(settings), ALONE, state_dir=tmp_path / "unfinished").model == local.model
    anew = on_this_machine(configured([*settings, "checkpoint.resume=never"]), ALONE)
    assert anew.model.path.endswith(hub.repositories["models/a/policy"].commit)


@pytest.mark.parametrize("command", ["eval", "drafter eval"])
def test_evaluations_measure_the_models_that_are_named_on_the_rows_of_the_run(
    hub: Hub, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    hub.repositories["models/a/drafter"] = Repository({"config.json": b"{ }"})
    settings.append("rollout.speculation={drafter: eagle, drafter_path: a/drafter}")
    local = on_this_machine(configured(settings), ALONE)
    write_config(local, tmp_path / "run", None, "x86_64")
    for key in hub.repositories:
        hub.repositories[key] = Repository({**hub.repositories[key].files, "config.json": b"{}"})
    measured: list[Config] = []
    for module, body in ((evaluate, "_eval_on"), (drafter, "_eval")):
        monkeypatch.setattr(module, "run_on_every_rank", lambda section, threads, start: start(ALONE) or 0)
        monkeypatch.setattr(module, body, lambda config, *_: measured.append(config))
    options = ["--drafter", str(tmp_path)] if command == "drafter eval" else []
    assert main([*command.split(), str(ROOT / "configs/quickstart.yaml"), *options, *settings]) == 0
    (config,) = measured
    served = config.rollout.speculation.drafter_path
    for name, path in {"policy": config.model.path, **({} if options else {"drafter": served})}.items():
        assert Path(str(path)).name == hub.repositories[f"models/a/{name}"].commit
    assert config.data.eval == local.data.eval
    assert config.data.train.path == "a/rows" and (served == "a/drafter") == bool(options), "what is not read stays"


def test_a_drafter_of_generate_may_be_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["models/a/drafter"] = Repository(DRAFTER)
    used: list[RolloutSection] = []
    monkeypatch.setattr(SingleProcess, "enter", lambda *_: None, raising=False)
    monkeypatch.setattr(generate, "run_on_every_rank", lambda section, threads, start: start(ALONE) or 0)
    monkeypatch.setattr(generate, "_checked_tokenizer", lambda args, engine, *_: used.append(engine))
    command = ["generate", "--model", "a/policy", "--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "o")]
    assert main([*command, "rollout.speculation={drafter: eagle3, drafter_path: a/drafter}"]) == 2
    assert (Path(str(used[0].speculation.drafter_path)) / "pytorch_model.bin").is_file()


@pytest.mark.parametrize("action", ["train", "eval"])
def test_a_drafter_of_the_command_line_may_be_a_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    hub.repositories["models/a/drafter"] = Repository(DRAFTER)
    read: list[Path] = []

    def stopped(config: Config, world: SingleProcess, args: argparse.Namespace) -> None:
        read.append(args.drafter)
        if action == "train":
            write_config(config, args.out / UNFINISHED, None, "x86_64")
            settings = training_settings(config, args.drafter, 1)
            drafter_state_writer({"settings": settings})(args.out / UNFINISHED / _STATE)

    monkeypatch.setattr(drafter, "run_on_every_rank", lambda section, threads, start: start(ALONE) or 0)
    monkeypatch.setattr(drafter, f"_{action}", stopped)
    command = ["drafter", action, str(ROOT / "configs/quickstart.yaml"), "--out", str(tmp_path / "out")]
    assert main([*command, "--drafter", "a/drafter"]) == 0
    assert [path.name for path in read] == [hub.repositories["models/a/drafter"].commit]
    assert (read[0] / "pytorch_model.bin").is_file()
    moved = hub.repositories["models/a/drafter"] = Repository(DRAFTER | {"config.json": b"{}"})
    for more in ([], ["checkpoint.resume=never"]):
        assert main([*command, "--drafter", "a/drafter", *more]) == 0
    expected = [read[0].name if action == "train" else moved.commit, moved.commit]
    assert [path.name for path in read[1:]] == expected, "what goes on has the commit that it began with"


def test_fine_tuning_that_goes_on_uses_the_commits_of_its_first_start(hub: Hub, tmp_path: Path) -> None:
    sft = {"train_path": "a/rows", "subset": "main", "out": str(tmp_path / "out")}
    config = build_config({"model": {"path": "a/policy"}, "sft": sft}, (), SftConfig)
    local = on_this_machine(config, ALONE)
    write_config(local, config.state_dir, None, "x86_64")
    for key in hub.repositories:
        hub.repositories[key] = Repository({**hub.repositories[key].files, "config.json": b"{}"})
    assert on_this_machine(config, ALONE) == local


def test_names_that_cannot_be_had_are_named_with_the_reason(hub: Hub, settings: list[str]) -> None:
    told = problems_of(*settings, "model.path=no/where", "data.eval.path=no/rows")
    assert f"model.path = 'no/where': {NO_PATH} {hub.url} has no model no/where (a private" in told
    assert f"data.eval.path = 'no/rows': {NO_PATH} {hub.url} has no dataset no/rows (a private" in told
    told = problems_of(*settings, "data.train.subset=x", "data.eval.split=val")
    assert "data.train.path = 'a/rows': a/rows: no subset 'x'; there are: main, socratic" in told
    assert "data.eval.path = 'a/rows': a/rows: no split 'val'; there are: test, train" in told
    assert not hub.fetched("safetensors"), "nothing is fetched in vain"
    assert "has a/policy, but no revision 'v9' of it" in problems_of("model.path=a/policy@v9")


def test_a_gated_model_needs_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"is gated: accept its terms at {hub.url}/a/gated, then set HF_TOKEN" in problems_of("model.path=a/gated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch_argument("--model", Path("a/gated"), ALONE) / "model.safetensors").is_file()


def test_a_disk_without_room_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuse)
    told = problems_of("model.path=a/policy")
    assert f"cannot be written to {constants.HF_HUB_CACHE}: No space left on device" in told


@pytest.mark.parametrize("offline", [True, False])
def test_a_cache_is_enough_where_the_hub_is_not_reachable(
    offline: bool, hub: Hub, settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local = on_this_machine(configured(settings), ALONE)
    hub.asked.clear()
    closed = "http://127.0.0.1:9"
    pretend(monkeypatch, hub.url if offline else closed, tmp_path / "cache", offline)
    assert on_this_machine(configured(settings), ALONE) == local
    why = "HF_HUB_OFFLINE is set" if offline else f"{closed} is not reachable"
    told = problems_of(*settings, "model.path=no/where", "data.eval.path=no/rows")
    if offline:
        told += problems_of(*settings, "data.train.subset=socratic")
    for name, kind in (("no/where", "model"), ("no/rows", "dataset"), *[("a/rows", "dataset")] * offline):
        assert f" = '{name}': {NO_PATH} no whole {kind} in the cache {tmp_path / 'cache'}; {why}" in told
    assert not hub.asked


def test_a_cache_that_another_tool_filled_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: list[str]
) -> None:
    """Snapshots and refs, as `hf download` leaves them; without listings of the repositories."""
    pretend(monkeypatch, "http://127.0.0.1:9", tmp_path, offline=True)
    kinds, commit = {"models--a--policy": POLICY, "datasets--a--rows": ROWS}, "1" * 40
    for folder, files in kinds.items():
        for name, data in files.items():
            path = tmp_path / folder / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (tmp_path / folder / "refs").mkdir()
        (tmp_path / folder / "refs/main").write_text(commit)
    local = on_this_machine(configured(settings), ALONE)
    snapshots = [str(tmp_path / folder / "snapshots" / commit) for folder in kinds]
    assert [local.model.path, local.data.train.path] == snapshots


@pytest.mark.slow
def test_check_says_what_would_be_fetched_and_fetches_where_it_is_asked_to(
    hub: Hub, settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["check", str(ROOT / "configs/quickstart.yaml"), *settings, "rewards.functions=[{name: exact}]"]
    command += ["rollout.speculation.allow_other_policy=true"]
    assert main(command) == 0
    said = capsys.readouterr().out
    commit = hub.repositories["models/a/policy"].commit[:12]
    assert f"to be fetched from {hub.url}: model.path = a/policy (commit {commit})" in said
    assert "data.train.path = a/rows (commit " in said
    assert "not on this machine" not in said and not hub.fetched("safetensors")
    assert "Memory of a rank, estimated" in said, "of the shape in config.json, which has been fetched"
    other = shape_of(ModelSection(path=str(ROOT / "assets/demo-policy"))).model_copy(update={"hidden_size": 64})
    assert main([*command, f"model.architecture={json.dumps(other.model_dump(mode='json'))}"]) == 2
    assert "model.architecture.hidden_size = 64: contradicts a/policy, which has" in capsys.readouterr().err
    assert main([*command, "--fetch"]) == 0
    assert "to be fetched" not in capsys.readouterr().out and len(hub.fetched("/model.safetensors")) == 1
    assert main([*command, "model.path=no/where"]) == 2
    assert "has no model no/where" in capsys.readouterr().err
    assert main([*command, "data.train.split=test"]) == 2, "evaluation uses the training prompts"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*command, "data.train.path=no/rows", "data.train.split=train"]) == 0
    assert f"data.train.path = no/rows ({NO_PATH} no whole dataset" in capsys.readouterr().out

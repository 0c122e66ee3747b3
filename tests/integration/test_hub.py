"""Commands on names of the hub, with HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN in the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helpers.hub_server import Hub, Repository, serving
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import assert_same_checkpoint, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]

WORKER = "tests/integration/workers/by_name.py"


def environment(hub: Hub, cache: Path, **env: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret", **env}


def run(hub: Hub, cache: Path, *arguments: object, ranks: int = 1, check: bool = True, **env: str) -> tuple[int, str]:
    """`megatron-tlt ARGUMENTS`, or a script with its arguments, on so many ranks: exit status and output."""
    done = run_ranks(ranks, WORKER, *map(str, arguments), env=environment(hub, cache, **env), check=check)
    return done.returncode, done.stdout


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, Path]]:
    """A hub with the tiny model, which needs a token, and its prompts; the configuration that names both."""
    path = write_config(tmp_path / "files", train={"num_steps": 1}, eval={"every": 0})
    files = tmp_path / "files"
    model = {file.name: file.read_bytes() for file in (files / "model").iterdir()}
    rows = {"train.jsonl": (files / "train.jsonl").read_bytes(), "test.jsonl": (files / "heldout.jsonl").read_bytes()}
    tree = yaml.safe_load(path.read_text())
    tree["model"]["path"] = "lab/tiny"
    tree["data"]["train"] = {"kind": "hf", "path": "lab/rows"}
    tree["data"]["eval"] = {"kind": "hf", "path": "lab/rows", "split": "test"}
    tree["train"]["run_dir"] = str(tmp_path / "run")
    named = tmp_path / "named.yaml"
    named.write_text(yaml.safe_dump(tree))
    tiny = Repository(model, gated=True, token="secret")
    with serving({"models/lab/tiny": tiny, "datasets/lab/rows": Repository(rows)}) as hub:
        yield hub, named


def test_a_run_by_names_equals_one_by_paths_and_goes_on_without_a_network(
    hub: tuple[Hub, Path], tmp_path: Path
) -> None:
    served, config = hub
    cache, run_dir = tmp_path / "cache", tmp_path / "run"
    _, said = run(served, cache, "train", config, ranks=2)
    assert said.count("fetching model.path = lab/tiny") == 1
    assert len(served.fetched("/model.safetensors")) == len(served.fetched("/train.jsonl")) == 1
    commit = served.repositories["models/lab/tiny"].commit
    recorded = json.loads((run_dir / "config.json").read_text())
    assert recorded["model"]["path"] == f"lab/tiny@{commit}"

    run(served, cache, "train", tmp_path / "files/tiny.yaml", ranks=2)
    steps = [folder / "checkpoints/step-000001" for folder in (run_dir, tmp_path / "files/run")]
    assert_same_checkpoint(*steps)

    served.repositories["models/lab/tiny"] = Repository({"config.json": b"{}"})  # main has moved on
    served.asked.clear()
    _, said = run(served, cache, "train", config, "train.num_steps=2", ranks=2, HF_HUB_OFFLINE="1")
    assert f"model.path = lab/tiny: commit {commit}, as recorded" in said
    run(served, cache, "export", config, "--out", tmp_path / "exported")
    assert (tmp_path / "exported/tokenizer.json").is_file()
    assert not served.fetched("")


def test_commands_and_tools_take_names(hub: tuple[Hub, Path], tmp_path: Path) -> None:
    served, config = hub
    cache, prompts, megatron = tmp_path / "cache", tmp_path / "prompts.jsonl", tmp_path / "megatron"
    prompts.write_text('{"prompt": [{"role": "user", "content": "say 1"}]}\n')
    generate = ["generate", "--model", "lab/tiny", "--prompts", prompts, "--out", tmp_path / "o.jsonl"]
    drafter = ["drafter", "train", config, "--out", tmp_path / "drafter", "rollout.speculation.drafter=eagle"]
    drafter += ["drafter.num_prompts=4", "drafter.eval_prompts=2", "drafter.num_steps=1", "drafter.batch_tokens=256"]
    completions = tmp_path / "sft.yaml"
    sft = {"train_path": "lab/rows", "completion_field": "answer", "num_steps": 1, "out": str(tmp_path / "sft")}
    completions.write_text(yaml.safe_dump({"model": {"path": "lab/tiny", "max_context": 128}, "sft": sft}))
    for command in (
        ["eval", config],
        [*generate, "--chat", "--max-tokens", 4],
        drafter,
        ["sft", completions],
        ["check", "--sft", completions, "--fetch", "checkpoint.resume=never"],
        ["tools/convert_hf_to_megatron.py", "--hf", "lab/tiny", "--out", megatron],
        ["tools/convert_megatron_to_hf.py", "--megatron", megatron, "--config", "lab/tiny", "--out", tmp_path / "back"],
        ["tools/inspect_checkpoint.py", megatron, "--compare", "lab/tiny", "--quick"],
    ):
        run(served, cache, *command)
    assert len(served.fetched("/model.safetensors")) == 1

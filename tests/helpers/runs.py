"""A tiny RL run for tests: a random two-layer policy, the demo tokenizer, a reward that can be learned; and commands of
a page, run as printed.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import yaml

from megatron_tlt.cli.generate import generate_file
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.types import EngineStats, Prompt, SamplingParams
from tests.helpers.mpi import ROOT, forking_python, rank_environment, run_ranks

TOKENIZER = ROOT / "assets" / "demo-policy"
FAULTS = "tests/integration/workers/faults.py"

# A drafter's warm-up that learns something in seconds.
TINY_WARM_UP = {
    "num_prompts": 24,
    "eval_prompts": 8,
    "num_steps": 60,
    "batch_tokens": 256,
    "lr": 1e-2,
    "draft_steps": 2,
    "eval_steps": 3,
    "eval_every": 30,
}

# A drafter from nothing drafts in every step, and trains behind each rollout, however short the waiting is.
TLT_ON = [
    "rollout.speculation.drafter=eagle",
    "rollout.speculation.selector=fixed",
    "idle.train_drafter=true",
    "idle.min_steps_per_window=2",
    "idle.min_tail_seconds=0",
]


def copy_run(run_dir: Path, target: Path) -> Path:
    """A copy of a run that was killed. Without status/: the dead rank's sidecar may be writing there still."""
    return Path(shutil.copytree(run_dir, target, ignore=shutil.ignore_patterns("status")))


def run_drafter(ranks: int, *arguments: object, **options):
    """`megatron-tlt drafter ARGUMENTS` on so many ranks; see `run_ranks`."""
    return run_ranks(ranks, ["-m", "megatron_tlt", "drafter"], *map(str, arguments), **options)


def make_model(directory: Path, num_layers: int = 2, hidden_size: int = 32) -> Path:
    """A random Qwen3, of two layers by default, with the demo tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    demo = json.loads((TOKENIZER / "config.json").read_text())
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=demo["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=demo["eos_token_id"],
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TOKENIZER / name).is_file():
            shutil.copy(TOKENIZER / name, directory / name)
    return directory


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Model, prompts and `tiny.yaml` in `folder`; `sections` are merged over the defaults."""
    make_model(folder / "model")
    train, held_out = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, numbers in ((train, range(24)), (held_out, range(24, 32))):
        path.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in numbers))
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "max_context": 128},
        "optimizer": {"lr": 1e-3},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 16, "max_running_requests": 32},
        "data": {
            "train": {"kind": "jsonl", "path": str(train)},
            "eval": {"kind": "jsonl", "path": str(held_out)},
            "max_prompt_tokens": 64,
        },
        "rewards": {
            "workers": 1,
            "functions": [{"name": "python", "path": "tests.helpers.rewards:vowels", "threshold": 0.2}],
        },
        "train": {"num_steps": 4, "prompts_per_step": 8, "run_dir": str(folder / "run")},
        "eval": {"every": 2, "num_prompts": 8, "samples_per_prompt": 2},
        "checkpoint": {"every": 1, "keep": 10},
        "distributed": {"timeout_s": 120},
        "observe": {"tensorboard": False, "progress": "plain"},
        "cluster": {"ranks_per_node": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in megatron's `torch_dist` format, whole, read without megatron."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(directory)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_checkpoint(left: Path, right: Path) -> None:
    """All tensors of both, those of the optimizer too, are the same bits."""
    a, b = checkpoint_tensors(left), checkpoint_tensors(right)
    assert a.keys() == b.keys() and any("exp_avg" in name for name in a)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, (right, different[:5])


# Figures of a step that a change of speed must not change.
SAME = ("reward/mean", "length/mean", "policy/loss", "policy/grad_norm", "engine/generated_tokens")


def assert_same_training(left: Path, right: Path, step: int) -> None:
    """Checkpoints of `step` of two runs are the same bits, and the figures of all steps are the same."""
    assert_same_checkpoint(*(run / f"checkpoints/step-{step:06d}" for run in (left, right)))
    figures = [[{name: row[name] for name in SAME} for row in rows(run)] for run in (left, right)]
    assert figures[0] == figures[1], right


def train_many(
    config: Path, jobs: dict[str, list[str]], ranks: int = 2, fault: str | dict[str, str] | None = None
) -> str:
    """Runs of `config` beside it, by name, with overrides, in one world of ranks; their output.

    `fault`: see the worker, for all of them or by name; with one, also "", ranks are uneven.
    """
    folder, listing = config.parent, config.parent / "jobs.json"
    faults = {name: fault.get(name, "") if isinstance(fault, dict) else fault for name in jobs}
    runs = {name: [f"train.run_dir={folder / name}", *options] for name, options in jobs.items()}
    given = [[str(config), options, faults[name]] for name, options in runs.items()]
    listing.write_text(json.dumps(given))
    return run_ranks(ranks, "tests/integration/workers/train_many.py", str(listing)).stdout


def run_with_fault(config: Path, fault: dict[str, Any], *overrides: str) -> subprocess.CompletedProcess[str]:
    """`megatron-tlt train CONFIG` on two ranks in which something goes wrong, and which does not end well.

    `fault`: by its name, see the worker.
    """
    done = run_ranks(2, FAULTS, json.dumps(fault), "train", str(config), *overrides, check=False, timeout=290)
    assert done.returncode != 0, done.stdout
    return done


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics rows of training steps, but one that is still being written."""
    text = (run_dir / "metrics.jsonl").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def steps_logged(run_dir: Path) -> int:
    """Training steps that a run in progress has logged."""
    return len(rows(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def rollout_digests(run_dir: Path) -> list[tuple[int, str, str]]:
    """Of each step the number of responses, and the digests of responses and rewards."""
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines()
    return [(row["samples"], row["responses"], row["rewards"]) for row in map(json.loads, lines)]


P = ParamSpec("P")
T = TypeVar("T")


def once(run: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` that keeps a failure, too: the tests of a failed run fail at once, none tries it again."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> tuple[T | None, Exception | None]:
        try:
            return run(*args, **kwargs), None
        except Exception as error:  # noqa: BLE001  (raised again below)
            return None, error

    @functools.wraps(run)
    def shared(*args: P.args, **kwargs: P.kwargs) -> T:
        value, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return shared


_LINKED = (".venv", "assets", "launch", "megatron_tlt", "slurm", "tools")
_COPIED = ("configs", "examples")  # paths in their files count from the files: through a link, from the repository's


def commands(text: str) -> list[str]:
    """The indented blocks of a Markdown text, one shell command each."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def make_folder(folder: Path) -> Path:
    """Links or copies the repository's parts into `folder`, from which the commands run."""
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name)
    return folder


def run_as_printed(folder: Path, printed: list[str]) -> None:
    """Runs every command in `folder`; ranks of `launch/local.sh` are forks. Fails with the failing command's output."""
    environment = rank_environment() | {"PYTHON": str(forking_python(folder))}
    for command in printed:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"


class _Alone(SingleProcess):
    device = "cpu"


def generate_alone(
    model: Path, prompts: Sequence[Prompt], out: Path, params: SamplingParams, **more: Any
) -> EngineStats:
    """`megatron-tlt generate` from its prompts on, in this process: one response to each, unless `more` says so."""
    unused = {"stats_path": None, "env": None, "turns": None, "more_of": lambda _: {}}
    options = {"n": 1, "rollout": RolloutSection(), "world": _Alone()} | unused | more
    return generate_file(model, prompts, out, params, None, **options)

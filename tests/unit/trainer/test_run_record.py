"""What a run that goes on has otherwise than at its last start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.observe.runfiles import CHANGES_FILE
from megatron_tlt.trainer.run_record import other_model, write_config
from tests.helpers.tiny_models import TINY, random_weights


def start(
    run_dir: Path, *overrides: str, step: int | None = 3, processor: str = "x86_64 avx2", has_drafter: bool = False
) -> list[str]:
    """The fields that this start has otherwise than the one before."""
    config = build_config({"model": {"path": "m"}}, [f"train.run_dir={run_dir}", *overrides], Config)
    return sorted(write_config(config, run_dir, step, processor, has_drafter))


# Learned from, and three of speed alone.
OTHERS = ["rollout.temperature=0.5", "rollout.max_tokens=9", "rollout.carry_over=8", "actor.lora.rank=4"]
OTHERS += ["actor.router_replay=rollout", "train.seed=3", "train.prompts_per_step=8"]
OTHERS += ["rollout.backend=vllm", "rollout.dtype=bf16", "eval.top_p=0.7"]
OTHERS += ["rollout.max_running_requests=7", "actor.micro_batch_tokens=512", "rollout.speculation.draft_len=3"]


def test_settings_that_changed_between_two_starts_are_named(tmp_path: Path) -> None:
    reward = "rewards.functions=[{name: python, path: r.py:f, threshold: %s}]"
    assert start(tmp_path, reward % 0.5) == []
    assert start(tmp_path, reward % 0.5, "train.num_steps=7") == []
    assert start(tmp_path, reward % 0.9, "optimizer.lr=0.5", "train.num_steps=8", *OTHERS) == [
        *("actor.lora", "actor.router_replay", "eval.top_p", "optimizer.lr", "rewards.functions.0.threshold"),
        *("rollout.backend", "rollout.carry_over", "rollout.dtype", "rollout.max_tokens", "rollout.temperature"),
        *("train.prompts_per_step", "train.seed"),
    ]


@pytest.mark.parametrize(
    ("has_drafter", "field"),
    [(True, "rollout.speculation.drafter_path"), (True, "actor.lora.adapter_path"), (False, None)],
)
def test_weights_that_the_checkpoint_replaces_are_named_as_without_effect(
    tmp_path: Path, has_drafter: bool, field: str | None
) -> None:
    """A checkpoint without a drafter, of a run that does not train it, leaves `drafter_path` its effect."""
    old = "rollout.speculation.drafter_path=/b"
    start(tmp_path, "actor.lora.rank=4", old, has_drafter=has_drafter)
    given = f"{field or 'rollout.speculation.drafter_path'}=/a"
    expected = [] if field is None else [f"{field} (without effect: the weights are the checkpoint's)"]
    assert (
        start(
            tmp_path, "actor.lora.rank=4", *([old] if field and "lora" in field else []), given, has_drafter=has_drafter
        )
        == expected
    )
    if has_drafter and field == "rollout.speculation.drafter_path":
        assert start(tmp_path, "actor.lora.rank=4", has_drafter=True) == [field], "with the rate of a new one"


def test_a_run_that_branches_off_is_compared_with_the_one_that_it_leaves(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    start(trunk, "optimizer.lr=0.5", step=None)
    resume = f"checkpoint.resume={trunk}/checkpoints/step-000003"
    assert start(branch, "optimizer.lr=0.25", resume) == ["optimizer.lr"]
    assert start(branch, "optimizer.lr=0.25", resume) == [], "its own record comes first"


def test_a_mapping_of_the_users_own_is_compared_whole(tmp_path: Path) -> None:
    python = "rewards.functions=[{name: python, path: r.py:f, params: {%s}}]"
    template = "data.chat_template_kwargs.reasoning_effort=low"
    assert start(tmp_path, python % "a: 1") == []
    assert start(tmp_path, python % "a: 1, b: 2") == ["rewards.functions.0.params"]
    assert start(tmp_path, python % "a: 1, b: 2", template) == ["data.chat_template_kwargs"]
    assert start(tmp_path, python % "b: 2") == ["data.chat_template_kwargs", "rewards.functions.0.params"]


def test_changes_are_kept_with_their_values_by_step(tmp_path: Path) -> None:
    def kept() -> list[tuple[int, dict[str, list[object]]]]:
        rows = [json.loads(line) for line in (tmp_path / CHANGES_FILE).read_text().splitlines()]
        return [(row["step"], row["changed"]) for row in rows]

    start(tmp_path, "optimizer.lr=0.5", step=None)
    assert not (tmp_path / CHANGES_FILE).exists()
    start(tmp_path, "optimizer.lr=0.25", step=4)
    start(tmp_path, "optimizer.lr=0.25", "eval.max_tokens=9", step=6, processor="x86_64 avx2 avx512f")
    first = (4, {"optimizer.lr": [0.5, 0.25]})
    other = {"eval.max_tokens": [None, 9], "processor": ["x86_64 avx2", "x86_64 avx2 avx512f"]}
    assert kept() == [first, (6, other)]
    start(tmp_path, "optimizer.lr=0.25", "eval.max_tokens=9", step=5, processor="x86_64 avx2 avx512f")
    assert kept() == [first, (5, other)], "a later line is of steps that are made again; its values are still set"
    start(tmp_path, "optimizer.lr=0.125", "eval.max_tokens=9", step=2)
    assert kept() == [(2, {"optimizer.lr": [0.5, 0.125], "eval.max_tokens": [None, 9]})], "the values of step 2"
    start(tmp_path, "optimizer.lr=0.125", step=1)
    assert kept() == [(1, {"optimizer.lr": [0.5, 0.125]})]
    assert start(tmp_path, "optimizer.lr=0.5", step=None) == kept() == [], "begun anew"


def test_code_of_a_user_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    reward, environment = code / "reward.py", "my_package.world:World"
    reward.write_text("from beside import score as reward")
    (code / "beside.py").write_text("def score(*four): return 1.0")
    options = f"rewards.functions=[{{name: python, path: '{reward}:reward'}}]", f"env.path={environment}"
    assert start(tmp_path, *options) == []
    assert start(tmp_path, *options) == []
    (code / "beside.py").write_text("def score(*four): return 0.5")
    assert start(tmp_path, *options) == [f"code.{reward}:reward (or a .py file beside it)"]

    def refuse(_: Path) -> bytes:
        raise PermissionError("of someone else")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert start(tmp_path, *options) == [], "a file beside it may not be read, and the run needs none"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["algorithm.kl_coef=0.1"], "reference.model.path (other weights)"),
        (["algorithm.kl_coef=0"], None),
        (["algorithm.name=distill", "algorithm.teacher={teacher}"], "reference.algorithm.teacher (other weights)"),
    ],
)
def test_weights_of_a_reference_that_were_written_anew_are_named(
    tmp_path: Path, given: list[str], named: str | None
) -> None:
    """Each start reads them where they are; the policy is the checkpoint's."""
    model, teacher = tmp_path / "model", tmp_path / "teacher"
    options = [f"model.path={model}", *(text.format(teacher=teacher) for text in given)]
    for shift, expected in ((0.0, None), (0.0, None), (0.1, named)):
        for directory in (model, teacher):
            weights = ((name, w + shift if "o_proj" in name else w) for name, w in random_weights(TINY))
            save_hf(directory, TINY, weights)
        assert start(tmp_path, *options) == ([] if expected is None else [expected])


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"])
@pytest.mark.parametrize("field", ["model.path", "model.tokenizer"])
def test_files_of_the_tokenizer_that_were_edited_are_named(tmp_path: Path, name: str, field: str) -> None:
    file = tmp_path / "model" / name
    file.parent.mkdir(parents=True)
    options = [f"{field}={tmp_path / 'model'}"]
    for text, expected in (("a", []), ("a", []), ("b", [f"tokenizer.{field} (other files)"])):
        file.write_text(text)
        assert start(tmp_path / "run", *options) == expected


CACHE = "/cache/models--Qwen--Qwen2.5-7B/snapshots/" + 40 * "0"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["model.path=/models/Qwen2.5-7B"], []),
        (["model.path=/elsewhere/Qwen2.5-7B/"], []),
        ([f"model.path={CACHE}"], []),
        (["model.path=/models/Qwen2.5-7B-Instruct"], ["model.path"]),
        (["model.path=/models/Qwen2.5-7B", "model.tokenizer=/models/other"], ["model.tokenizer"]),
        (["model.path=/models/x", "model.tokenizer=/models/y"], ["model.path", "model.tokenizer"]),
    ],
)
def test_a_model_that_is_not_that_of_the_run_is_named(tmp_path: Path, given: list[str], names: list[str]) -> None:
    start(tmp_path, "model.path=/models/Qwen2.5-7B")
    config = build_config({"model": {"path": "m"}}, given, Config)
    found = other_model(config, tmp_path)
    assert [text.partition(" = ")[0] for text in found] == names
    assert all("config.json of the run has /models/Qwen2.5-7B;" in text for text in found)
    assert not other_model(config, tmp_path / "of an earlier version, without a record")

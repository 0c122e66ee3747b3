"""What `check` and a start say of rewards, environments and settings that are allowed and most likely not meant."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_tlt.config.root import SftConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.trainer.input_warnings import disk_warning, input_warnings
from megatron_tlt.trainer.preflight import check_report, input_problems, without_training
from tests.helpers.chat_models import DEMO_POLICY, QWEN3, chat_model
from tests.helpers.checked_configs import ARCHITECTURE, make

ENVIRONMENTS = Path(__file__).parents[1] / "envs/user_envs.py"
REWARDS = Path(__file__).parents[1] / "rewards/user_rewards.py"


def test_a_reward_that_fails_is_a_warning_before_the_run(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def none(p, a, r, m): pass\ndef one(p, a, r, m): return 1\ndef bad(p, a, r, m): return r[0]\n")

    def said(name: str) -> str:
        return check_report(make(rewards={"functions": [{"name": "python", "path": f"{file}:{name}"}]}), 4)

    of = "of an empty response to the first prompt"
    failed = f"\nwarning: rewards {of} failed, which counts 0: "
    assert f"{failed}none: ValueError: returned None (NoneType): must be a number or a boolean" in said("none")
    assert f"\nRewards {of}: one 1\n" in said("one")
    assert f"{failed}bad: IndexError" in said("bad")


def test_check_names_the_functions_that_a_correct_response_needs():
    form = {"name": "format", "pattern": "4.*"}
    both = make(rewards={"functions": [{"name": "task", "threshold": 0.9}, form]})
    needs = "a response with all of: task at least 0.9 (rewards.functions.0), format at least 1 (rewards.functions.1);"
    assert needs in check_report(both, 4)
    bonus = make(rewards={"functions": [{"name": "task"}, form | {"threshold": None}]})
    assert "a response with all of" not in check_report(bonus, 4)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator = k1 with .* Use k2"),
        ({"ratio_clip_high": 0.28}, "ratio_clip_high = 0.28 has no effect with algorithm.mini_batches = 1"),
        ({"name": "gspo"}, "name = gspo with algorithm.mini_batches = 1"),
    ],
)
def test_what_an_algorithm_does_not_use_is_a_warning_of_check(algorithm, says):
    assert re.search(f"warning: algorithm.{says}", check_report(make(algorithm=algorithm), 4))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"name": "gspo", "ratio_clip_low": 0.2, "ratio_clip_high": 4e-4}, "ratio_clip_low = 0.2: gspo clips a whole"),
        ({"name": "dapo", "ratio_clip_high": 4e-4}, "ratio_clip_high = 0.0004: dapo clips a token's ratio"),
        ({"name": "gspo", "ratio_clip_low": 3e-4}, None),
        ({"name": "grpo", "ratio_clip_low": 0.1, "ratio_clip_high": 0.3}, None),
    ],
)
def test_a_clip_of_the_other_kind_of_ratio_is_a_warning(algorithm, says):
    found = [text for text in input_warnings(make(algorithm=algorithm | {"mini_batches": 4}), "cpu") if "clip" in text]
    assert [f"algorithm.{says}" in text for text in found] == ([] if says is None else [True])


@pytest.mark.parametrize(
    ("lr", "vocab_size", "actor", "says"),
    [
        (2e-4, 1_000_000, {}, "0.0002 is high for RL of all of 1.28e+08 parameters, usually 1e-6 to 2e-05"),
        (2e-5, 1_000_000, {}, None),
        (2e-4, 288, {}, None),
        (2e-4, 1_000_000, {"lora": {"rank": 8}}, None),
        (1e-3, 1_000_000, {"lora": {"rank": 8}}, "0.001 is high for RL of adapters of 1.28e+08 parameters"),
        (1e-6, 288, {"lora": {"rank": 8}}, "1e-06 is usual for full training; adapters learn with about ten times as"),
    ],
)
def test_a_learning_rate_that_does_not_fit_the_model_is_a_warning(lr, vocab_size, actor, says):
    """Of `check`, and of a start, which logs the same list; of fine-tuning only where it is too low."""
    model = {"path": "not/here", "architecture": ARCHITECTURE | {"vocab_size": vocab_size}}
    config = make(model=model, optimizer={"lr": lr}, actor=actor)
    found = [text for text in input_warnings(config, "cpu") if text.startswith("optimizer.lr = ")]
    assert [f"optimizer.lr = {says}" in text for text in found] == ([] if says is None else [True])
    assert all(f"\nwarning: {text}\n" in check_report(config, 1, elsewhere=True) for text in found)
    sft = SftConfig.model_validate({"model": model, "optimizer": {"lr": lr}, "sft": {"train_path": "t", "out": "o"}})
    of_rate = [text for text in input_warnings(sft, "cpu") if text.startswith("optimizer.lr = ")]
    low = ["optimizer.lr = 1e-06 is usual for RL; fine-tuning of all weights takes about 1e-5, of small models more"]
    assert of_rate == (low if lr == 1e-6 else [])


@pytest.mark.parametrize(("warmup", "says"), [(4, []), (8, ["optimizer.warmup_steps = 8 exceeds the 4 optimizer"])])
def test_a_warm_up_beyond_the_last_step_is_a_warning(warmup, says):
    optimizer = {"lr": 1e-5, "warmup_steps": warmup}
    sft = {"train_path": "t", "out": "o", "num_steps": 4}
    tuned = SftConfig.model_validate({"model": {"path": "not/here"}, "optimizer": optimizer, "sft": sft})
    for config in (tuned, make(optimizer=optimizer, train={"num_steps": 4})):
        found = [text for text in input_warnings(config, "cpu") if "warmup" in text]
        assert [text[: len(says[0])] for text in found] == says


def test_records_that_are_not_learned_whole_are_counted(tmp_path):
    model = chat_model(tmp_path / "m", QWEN3)
    row = {"prompt": "1 + 2", "completion": "3"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = tmp_path / "r.jsonl"
    sft = {"train_path": str(path), "out": "o"}
    found = []
    for rows in ([row], [row, {**row, "completion": " "}, {**row, "completion": ""}, {**row, "tools": tools}]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = SftConfig.model_validate({"model": {"path": str(model)}, "sft": sft})
        found.append([text for text in input_warnings(config, "cpu") if text.startswith("sft.train_path")])
    assert found[0] == []
    blank, unseen = found[1]
    at = f"sft.train_path = {path}"
    assert blank == f"{at}: 2 of 4 records have no text to learn and are left out (the first: {path}:2)"
    assert unseen.startswith(f"{at}: the chat template of {model} does not read 'tools', so prompts do not show")


def test_check_counts_the_records_beyond_the_context(tmp_path):
    path, row = tmp_path / "r.jsonl", {"prompt": "1 + 2", "completion": "3"}
    tree = {
        "model": {"path": str(DEMO_POLICY), "max_context": 64},
        "sft": {"train_path": str(path), "out": str(tmp_path / "o")},
    }
    long = {**row, "prompt": "1 + 2 " * 50}
    path.write_text(json.dumps(row) + "\n" + json.dumps(long) + "\n")
    said = f"\nwarning: sft.train_path = {path}: 1 of 2 records have more than model.max_context = 64 tokens"
    assert said in check_report(SftConfig.model_validate(tree), 1)
    path.write_text(json.dumps(long) + "\n")
    with pytest.raises(ConfigError, match=r"all 1 records have more than model\.max_context = 64 tokens"):
        check_report(SftConfig.model_validate(tree), 1)


def test_texts_to_learn_that_are_rendered_already_are_counted(tmp_path):
    """One that ends with the end token gets no second one, and a token before a call is meant."""
    path, asked = tmp_path / "r.jsonl", {"role": "user", "content": "1 + 2"}
    texts = ["3", "3<|end|>", "<|pad|>3", "3<|end|>\n<|user|>4"]
    forms = [{"prompt": "1 + 2", "completion": text} for text in texts]
    forms += [{"messages": [asked, {"role": "assistant", "content": text}]} for text in texts]
    path.write_text("".join(json.dumps(form) + "\n" for form in forms))
    tree = {"model": {"path": str(DEMO_POLICY)}, "sft": {"train_path": str(path), "out": "o"}}
    (found,) = [text for text in input_warnings(SftConfig.model_validate(tree), "cpu") if "special token" in text]
    assert f"2 of 8 rows have a special token in their text, as a rendered conversation has (first {path}:4" in found


def test_turns_of_the_assistant_that_are_context_are_counted(tmp_path):
    asked, answer = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
    rows = [[asked, answer], [asked, answer, asked, answer], [asked, answer, asked, answer, asked, answer]]
    for count, says in ((1, []), (3, ["3 of 6 turns of the assistant stand before the last message of the user"])):
        path = tmp_path / "r.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[:count]))
        tree = {"model": {"path": "not/here"}, "sft": {"train_path": str(path), "out": "o", "chat_template": False}}
        found = [text for text in input_warnings(SftConfig.model_validate(tree), "cpu") if "context" in text]
        assert len(found) == len(says)
        assert all(text.startswith(f"sft.train_path = {path}: {say}") for text, say in zip(found, says, strict=True))


def test_fp32_on_gpus_is_a_warning_that_names_the_fields_that_a_command_reads():
    gpu, bf16 = {"distributed": {"device": "cuda"}}, {"dtype": "bf16"}
    sft = SftConfig.model_validate({"model": {"path": "not/here"}, "sft": {"train_path": "t", "out": "o"}, **gpu})
    evaluated = without_training(make(rollout=bf16, **gpu), reads_prompts=False)
    for config, device, named in (
        (make(**gpu), "cuda", "actor.dtype = fp32, rollout.dtype = fp32: "),
        (make(actor=bf16, **gpu), "cuda", "actor.dtype = bf16, rollout.dtype = fp32: "),
        (make(actor=bf16, rollout=bf16, **gpu), "cuda", None),
        (evaluated, "cuda", None),
        (sft, "cuda", "actor.dtype = fp32: "),
        (make(), "cpu", None),
    ):
        found = [text for text in input_warnings(config, device) if "dtype = fp32" in text]
        assert [text.startswith(str(named)) for text in found] == [True] * (named is not None)


def test_a_drafter_that_nothing_reads_is_a_warning_of_check():
    report = check_report(make(rollout={"speculation": {"drafter_path": "not/here"}}), 4, elsewhere=True)
    assert "\n  drafter: none\n" in report and "warning: rollout.speculation.drafter_path = not/here has no" in report


def test_a_drafter_that_one_replica_does_not_train_is_a_warning_of_check():
    speculation = {"drafter": "eagle", "drafter_path": "not/here"}
    config = make(rollout={"speculation": speculation}, idle={"train_drafter": True})
    said = "\nwarning: idle.train_drafter = true has no effect with one rollout replica, which never waits: "
    assert [said in check_report(config, ranks, elsewhere=True) for ranks in (1, 2)] == [True, False]


def test_modules_to_recompute_that_nothing_reads_are_a_warning():
    for recompute, modules, is_named in (("none", ["mlp"], True), ("selective", ["mlp"], False), ("none", None, False)):
        actor = {"recompute": recompute, **({} if modules is None else {"recompute_modules": modules})}
        found = [text for text in input_warnings(make(actor=actor), "cpu") if "recompute" in text]
        assert len(found) == is_named and all("[mlp] has no effect with actor.recompute = none" in t for t in found)


@pytest.mark.parametrize("name", ["math", "exact"])
def test_a_reward_that_compares_needs_answers(name, tmp_path):
    """No row has one: refused, for all responses would fail; some have one: a warning."""
    rewards = {"functions": [{"name": "format", "pattern": "."}, {"name": name}]}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    file, of_env = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}, {"kind": "env"}
    judged, answered = {"name": "graph_color"}, {"name": "chain_sum"}
    for source, env in ((file, None), (of_env, {"kind": "number_guess"}), ({"tasks": [judged]}, None)):
        (problem,) = input_problems(make(data={"train": source}, env=env, rewards=rewards))
        assert (problem.path, problem.value) == ("rewards.functions.1.name", name)
        assert "the rows of data.train have none" in problem.allowed
    mixed = {"train": {"tasks": [answered, judged]}}
    assert not input_problems(make(data=mixed, rewards=rewards))
    (found,) = [text for text in input_warnings(make(data=mixed, rewards=rewards), "cpu") if "to compare" in text]
    assert found.startswith(f"data.train.tasks.1.name = graph_color: reward {name!r} has nothing to compare with")


def test_an_environment_is_played_before_a_run():
    own = {"functions": [{"name": "python", "path": f"{REWARDS}:good"}]}
    report = check_report(make(env={"path": f"{ENVIRONMENTS}:Act"}, rewards=own), 4)
    assert "\nEnvironment: a scripted episode" in report
    assert "\nRewards of an empty response to the first prompt: good 0\n" in report, "also beside an environment"
    assert "do not count" not in report
    with pytest.raises(ConfigError, match="function of prompt, seed and turns"):
        check_report(make(env={"path": f"{ENVIRONMENTS}:Dice"}), 4)


def test_rewards_of_an_environment_that_has_none_or_that_nothing_reads_are_named():
    functions = [{"name": "task"}, {"name": "env"}]
    for env, rewards in (({"kind": "calculator"}, functions), ({"path": f"{ENVIRONMENTS}:Echo"}, functions[1:])):
        (problem,) = input_problems(make(env=env, rewards={"functions": rewards}))
        assert problem.path == f"rewards.functions.{len(rewards) - 1}.name"
        assert "0 for every response" in problem.allowed and "without score" in problem.allowed
    shop = {"path": f"{ENVIRONMENTS}:Shop"}
    assert not input_problems(make(env=shop, rewards={"functions": functions}))
    for env, count in ((shop, 1), ({"kind": "number_guess"}, 1), ({"kind": "calculator"}, 0)):
        found = [text for text in input_warnings(make(env=env), "cpu") if "do not count, only task" in text]
        assert len(found) == count
    assert not [t for t in input_warnings(make(env=shop, rewards={"functions": functions}), "cpu") if "count" in t]


@pytest.mark.parametrize(("free", "there", "is_warned"), [(7, 0, False), (5, 0, True), (5, 3, False), (1, 9, True)])
def test_a_disk_without_room_for_the_checkpoints_is_named(free, there, is_warned, tmp_path, monkeypatch):
    """One takes 1.5 GB, and with the one under way there are four; `there` are on the disk already."""
    run = tmp_path / "runs/a"
    for step in range(there):
        (run / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    looked_at = []
    usage = SimpleNamespace(free=int(free * 1e9))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: looked_at.append(folder) or usage)
    config = make(
        model={"path": "not/here", "architecture": ARCHITECTURE | {"vocab_size": 1_000_000}},
        train={"run_dir": str(run)},
    )
    assert (disk_warning(config) is not None) == is_warned
    assert looked_at == [run if there else tmp_path]
    assert not is_warned or "checkpoint.keep = 3" in str(disk_warning(config))
    assert disk_warning(without_training(config, reads_prompts=False)) is None

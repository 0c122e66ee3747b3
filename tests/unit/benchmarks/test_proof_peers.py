"""What proof_trl.py and proof_vllm.py give a peer: this project's prompts, tools and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import reasoning_gym

from benchmarks.lib import proof_trl, tool_policy, trl_tools
from benchmarks.lib.prompt_rows import RowReward, read_rows, write_rows
from megatron_tlt.config.env import EnvSection
from megatron_tlt.config.load import load_config
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.envs.python import Python
from megatron_tlt.envs.tools import ToolEnvironment
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.types import Sample, SampleGroup
from tests.helpers.mpi import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def config():
    return load_config(
        QUICKSTART,
        [f"model.path={ROOT / 'assets/demo-policy'}", "rewards.workers=0", "data.system_prompt=Be brief."],
    )


@pytest.fixture(scope="module")
def prompts(config):
    tokenizer = HFTokenizer(config.model.path)
    return build_prompts(config.data, "train", tokenizer, config.train.seed).next_batch(24)


def test_rows_are_the_runs_prompts(config, prompts, tmp_path: Path):
    from transformers import AutoTokenizer

    write_rows(prompts, config.data, tmp_path / "rows.jsonl")
    rows = read_rows(tmp_path / "rows.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    ids = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True)["input_ids"] for r in rows]
    assert ids == [list(p.token_ids) for p in prompts]
    assert [r["token_ids"] for r in rows] == ids


def test_a_row_is_rewarded_as_the_run_rewards_it(config, prompts, tmp_path: Path):
    """Right, nearly right, wrong and missing responses: the pool that a run scores with is the other side."""
    write_rows(prompts, config.data, tmp_path / "rows.jsonl")
    texts = [
        lambda p: f"so <answer>{p.answer}</answer>",
        lambda p: f"<answer>{p.answer} or so</answer>",
        lambda p: "<answer>nothing</answer>",
        lambda p: str(p.answer),
    ]
    groups = [
        SampleGroup(p, [Sample(p.prompt_id, i, [], [], text(p), "stop", 0) for i, text in enumerate(texts)])
        for p in prompts
    ]
    pool = RewardPool(config.rewards)
    pool.score(groups)
    pool.close()
    reward = RowReward(config.rewards)
    values = [
        [reward(row["fields"], sample.text) for sample in group.samples]
        for row, group in zip(read_rows(tmp_path / "rows.jsonl"), groups, strict=True)
    ]
    assert values == [[r.value for r in group.rewards] for group in groups]
    assert {v for of_prompt in values for v in of_prompt} >= {0.0, 1.0}


def test_settings_that_trl_has_not_are_refused(config):
    proof_trl.check_same(config)
    other = load_config(QUICKSTART, ["algorithm.kl_coef=0.1", "rollout.top_p=0.9"])
    with pytest.raises(SystemExit, match=r"kl_coef is 0.1.*top_p.*0\.9"):
        proof_trl.check_same(other)


def test_trl_sees_an_observation_in_the_runs_tokens():
    """As `GRPOTrainer._get_tool_suffix_ids` finds them, behind the end token that the policy drew."""
    from transformers import AutoTokenizer

    path = str(ROOT / "assets/demo-policy")
    ours = TurnTokens(HFTokenizer(path), chat=True, max_observation_tokens=64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    trl_tools.prepare_tokenizer(tokenizer)
    call = {"type": "function", "function": {"name": "calculate", "arguments": {}}}
    messages = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = tokenizer.apply_chat_template(messages, return_dict=False)
    messages.append({"role": "tool", "name": "calculate", "content": "7"})
    after = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert after[: len(before)] == before and before[-1] == tokenizer.eos_token_id
    assert tuple(after[len(before) :]) == ours.given("7", "user", [tokenizer.eos_token_id])


@pytest.mark.parametrize("kind", ["calculator", "python"])
def test_trl_calls_the_tools_that_a_run_calls(kind):
    made = trl_tools.environment_class(EnvSection(kind=kind, tool_role="user"))()
    made.reset(prompt="")
    calculate = kind == "calculator"
    tool, argument, good = (made.calculate, "expression", "6 * 7") if calculate else (made.python, "code", "print(42)")
    assert tool(**{argument: good}) == "42" and tool(**{argument: "6 *"}).startswith("error: ")


def test_the_tool_policy_is_taught_calls_that_answer_the_prompt():
    config = load_config(tool_policy.CONFIGS["python"], [f"model.path={ROOT / 'assets/demo-policy'}"])
    environment = ToolEnvironment(Python(), "user")
    for task in config.data.train.tasks:
        data = reasoning_gym.create_dataset(task.name, size=2, seed=3, **task.params)
        for entry in data:
            call, observation = tool_policy.call_of(entry)
            assert environment.step(call).observation == observation
            assert data.score_answer(observation, entry) == 1.0

"""The examples: every command of their READMEs as printed, and what it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.rewards.base import judge
from megatron_tlt.rewards.build import build_scorers
from megatron_tlt.types import Prompt, Sample
from tests.helpers.judge_server import judging
from tests.helpers.mpi import ROOT
from tests.helpers.runs import commands, make_folder, run_as_printed

FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md"))
NOT_HERE = re.compile(r"sbatch -N|squeue|megatron-tlt (status|report) runs/slurm-7b|vllm serve")  # GPUs, a server
GSM8K = {"question": "A pen costs 2. What do three cost?", "answer": "Three cost 3 * 2 = 6.\n#### 6"}
JUDGE = "http://127.0.0.1:8000/v1/chat/completions"
LEFT = {
    "own_drafter": "runs/own-drafter-sglang/config.json",
    "own_env": "own-env.html",
    "own_judge": "own-judge.html",
    "own_reward": "own-reward.html",
    "slurm_7b": "data/math-train.jsonl",
}


@pytest.mark.ci
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("example", FOLDERS, ids=lambda path: path.name)
def test_the_commands_of_an_example_run_as_printed(example: Path, tmp_path: Path):
    for name in ("problems.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text(json.dumps(GSM8K) + "\n")
    printed = commands((example / "README.md").read_text())
    folder = make_folder(tmp_path)
    with judging("Score: 7") as (url, questions):
        config = folder / "examples" / example.name / "run.yaml"
        config.write_text(config.read_text().replace(JUDGE, url))
        run_as_printed(folder, [command for command in printed if not NOT_HERE.search(command)])
    assert (tmp_path / LEFT[example.name]).stat().st_size > 0
    assert bool(questions) == (example.name == "own_judge")


@pytest.mark.parametrize(
    ("replies", "outcome", "times"),
    [
        ([503, 429, "Clear.\nScore: 7"], "0.7", 3),
        ([503], "HTTP Error 503", 3),
        ([401, "Score: 7"], "HTTP Error 401", 1),
        (["I cannot say."], "the judge gave no score, but 'I cannot say.'", 1),
    ],
)
def test_a_judge_is_asked_again_after_errors_that_may_pass(replies: list[int | str], outcome: str, times: int):
    path = f"{ROOT}/examples/own_judge/reward.py:reward"
    with judging(*replies) as (url, questions):
        params = {"url": url, "model": "judge", "wait_s": 0.0}
        scorers = build_scorers(RewardSection(functions=(RewardConfig(name="python", path=path, params=params),)))
        response = Sample(0, 0, [], [], "It is {4}.", "stop", 0)
        result = judge(scorers, 0.0, Prompt(0, "d:0", (), "Calculate 2 + 2.", "4"), response)
    assert outcome in (result.failure or str(result.value))
    assert len(questions) == times and "It is {4}." in questions[0]

"""The commands beside `train`, one after the other on a tiny run: export, eval, generate, sft, check."""

import json
import re

import pytest
import torch
import yaml

from megatron_tlt.models.hf.loader import iter_weights
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]


def command(ranks, *arguments, **options):
    return run_ranks(ranks, ["-m", "megatron_tlt"], *map(str, arguments), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a run of one step, and its policy exported to `exported`."""
    folder = tmp_path_factory.mktemp("commands")
    config = write_config(folder, train={"num_steps": 1}, eval={"every": 0}, checkpoint={"every": 0})
    command(2, "train", config)
    other = ("actor.tp=4", "actor.sequence_parallel=true", "rollout.tp=4")  # as a run on four ranks: one rank takes it
    done = command(1, "export", config, *other, "--out", folder / "exported")
    assert f"wrote {folder / 'exported'} (policy version 1)" in done.stdout
    return folder


def test_export_writes_the_trained_policy_for_transformers(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start, trained = (dict(iter_weights(run / name)) for name in ("model", "exported"))
    assert start.keys() == trained.keys()
    assert all(not torch.equal(start[name], trained[name]) for name in start)
    model = AutoModelForCausalLM.from_pretrained(run / "exported", dtype="auto")
    assert torch.equal(model.model.norm.weight, trained["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(run / "exported").chat_template


def test_eval_is_the_same_on_one_and_two_ranks(run):
    results = []
    for ranks in (1, 2):
        out = run / f"new-{ranks}" / "eval.json"
        command(ranks, "eval", run / "tiny.yaml", f"model.path={run / 'exported'}", "--out", out)
        results.append(json.loads(out.read_text()))
    assert results[0] == results[1]
    assert results[0]["num_prompts"] == 8 and set(results[0]["pass_at"]) == {"1", "2"}


def test_eval_warns_of_rewards_that_never_reach_the_default_threshold(run, tmp_path):
    (tmp_path / "half.py").write_text("def half(prompt, answer, response, metadata):\n    return 0.5\n")
    rewards = f"rewards.functions=[{{name: python, path: {tmp_path / 'half.py'}:half}}]"
    done = command(1, "eval", run / "tiny.yaml", f"model.path={run / 'exported'}", rewards)
    assert "warning: no reward reaches 1, though their mean is 0.5" in done.stdout
    assert '"failures": 0' in done.stdout


def test_generate_is_the_same_on_one_and_two_ranks(run):
    (run / "in.jsonl").write_text('{"prompt": "say 1"}\n{"prompt": "say 2"}\n')
    responses = []
    for ranks in (1, 2):
        out, stats = run / f"out-{ranks}.jsonl", run / f"stats-{ranks}.json"
        files = ["--model", run / "exported", "--prompts", run / "in.jsonl", "--out", out, "--stats", stats]
        command(ranks, "generate", *files, "--n", 3, "--max-tokens", 12, "--seed", 5, "--chat", "--logprobs")
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert json.loads(stats.read_text())["generated_tokens"] == sum(len(a["token_ids"]) for a in lines)
        assert all(len(a["logprobs"]) == len(a["token_ids"]) <= 12 for a in lines)
        responses.append([(a["prompt_index"], a["sample_index"], a["token_ids"], a["text"]) for a in lines])
    assert len(responses[0]) == 6
    assert responses[0] == responses[1]  # two ranks round sums otherwise: these seeds meet no near-tie


def test_generate_with_an_environment_writes_its_turns(run, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "say 1", "answer": "1"}\n')
    files = ["--model", run / "exported", "--prompts", prompts, "--out", out]
    limits = ["env.params.most_s=0", "env.max_turns=3", "env.max_turn_tokens=4", "--max-tokens", 40]
    command(1, "generate", *files, "--chat", "--env", "tests.helpers.late_environments:LateEnvironments", *limits)
    (line,) = map(json.loads, out.read_text().splitlines())
    turns = line["turns"]
    assert len(turns) == len(line["given"]) + 1 >= 2
    assert [turn["reward"] for turn in turns[: len(line["turn_rewards"])]] == line["turn_rewards"]
    assert all(turn["observation"] for turn in turns[:-1]) and line["text"] in turns[-1]["response"]


@pytest.fixture(scope="module")
def tuning(run):
    """The configuration of a fine-tuning run and its losses, after it has run to its end on two ranks."""
    folder = run / "sft"
    folder.mkdir()
    records = "".join(json.dumps({"prompt": f"say {i}", "completion": "aeiou"}) + "\n" for i in range(40))
    for name in ("data.jsonl", "held-out.jsonl"):
        (folder / name).write_text(records)
    tree = {
        "model": {"path": str(run / "model"), "max_context": 64},
        "optimizer": {"lr": 1e-2},
        "sft": {
            "train_path": str(folder / "data.jsonl"),
            "eval_path": str(folder / "held-out.jsonl"),
            "out": str(folder / "out"),
            "num_steps": 8,
            "tokens_per_step": 200,
            "eval_every": 1,
        },
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    done = command(2, "sft", folder / "sft.yaml")
    assert done.stdout.endswith(f"wrote {folder / 'out'}\n")
    losses = [float(x.split("held-out")[1].split()[0]) for x in done.stdout.splitlines() if "held-out" in x]
    return folder / "sft.yaml", losses


def test_sft_lowers_the_held_out_loss_and_writes_a_model(run, tuning):
    config, losses = tuning
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    assert dict(iter_weights(config.parent / "out")).keys() == dict(iter_weights(run / "model")).keys()


STOPPED = """
import os, signal, sys
from megatron_tlt.cli.main import main
from megatron_tlt.trainer.sft import SftTrainer
def report_and_stop(self, step, *rest):
    report(self, step, *rest)
    if step == 5 and self.world.rank == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
report, SftTrainer._report = SftTrainer._report, report_and_stop
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("name", "says"), [("SIGTERM", "the next start goes on there"), ("SIGKILL", "")])
def test_sft_goes_on_where_it_was_stopped(tuning, tmp_path, name, says):
    """To the weights of a run that was not, and with no other records."""
    config, _ = tuning
    given = ["sft", config, f"sft.out={tmp_path / 'out'}", "checkpoint.every=2", "checkpoint.asynchronous=false"]
    stopped = run_ranks(2, ["-c", STOPPED], name, *map(str, given), check=False)
    assert stopped.returncode == 75 if says else stopped.returncode != 0, stopped.stdout
    assert says in stopped.stdout and not (tmp_path / "out/config.json").exists()
    left_behind = tmp_path / "out/.unfinished"  # by a kill during its removal
    left_behind.mkdir()
    (left_behind / "lock").touch()
    refused = command(1, *given, "sft.seed=1", check=False)
    assert refused.returncode == 2 and "checkpoint.resume = 'auto': " in refused.stdout, refused.stdout
    done = command(2, *given)
    (resumed,) = [int(n) for n in re.findall(r"resumes after step (\d+) of", done.stdout)]
    assert resumed >= 5 if says else resumed == 4
    assert f"sft step {resumed}/8" not in done.stdout and "sft step 8/8" in done.stdout
    whole, again = (dict(iter_weights(folder / "out")) for folder in (config.parent, tmp_path))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    rows = map(json.loads, (tmp_path / "out/losses.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert not [*tmp_path.glob("out/*unfinished")]

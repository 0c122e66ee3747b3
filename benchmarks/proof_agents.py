"""Runs with `retry`, `calculator` and `python` have the same bits whatever drafts, delays, kills or generates.

    python benchmarks/proof_agents.py [--quick] [--environments retry calculator python] [--work DIR] --out r.json

For each environment, two steps of GRPO in fp32 on the same prompts: `retry` with the demo policy, the tools with one
that calls them (`lib/tool_policy.py`, which takes two minutes to make).

    off      TLT off, 2 ranks
    one      TLT off, 1 rank
    on       TLT on, 2 ranks
    late     TLT on, 2 ranks; each answer comes after up to 0.3 s, by chance
    killed   TLT on, 2 ranks; one is killed with SIGKILL in the second step's rollout, and the run resumed
    vllm     TLT on, 2 ranks, each with a vLLM (`make setup-vllm`; left out without one)

Summary: `NAME_ENVIRONMENT` is 1 where responses, rewards and the weights with the optimizer's state are those of `off`;
for `one`, which adds gradients in another order, and `vllm`, whose log-probs are rounded otherwise, responses and
rewards only. `turns_ENVIRONMENT`: drawn turns of a trajectory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_idle import OFF, ON
from lib.bench_record import ROOT, write_record
from lib.training_runs import Rows, digests, launch

sys.path.insert(0, str(ROOT))
from benchmarks.lib.tool_policy import CONFIGS, make_tool_policy
from megatron_tlt.backends.vllm.launch import find_python
from megatron_tlt.config.engine_process import VllmSection

ENVIRONMENTS = {"retry": ROOT / "configs/agents/retry.yaml", **CONFIGS}
WORKERS = ROOT / "tests/integration/workers"
STEPS, MOST_S = 2, 0.3
DIFFERENCES = {  # of a run from `off`
    "off": OFF,
    "one": OFF,
    "on": ON,
    "late": ON,
    "killed": ON,
    "vllm": [*ON, "rollout.backend=vllm"],
}
RESPONSES = ("responses", "rewards")
COMPARED = {"one": RESPONSES, "vllm": RESPONSES}  # others: with the weights


def options_of(args: argparse.Namespace, environment: str, name: str) -> list[str]:
    """Settings of a run, but for how often it is saved."""
    found = [f"train.run_dir={args.work / f'{environment}-{name}'}", f"train.num_steps={STEPS}", "eval.every=0"]
    found += ["observe.tensorboard=false", "observe.progress=none"]
    found += ["checkpoint.every=1", "checkpoint.asynchronous=false"]
    found += [f"train.prompts_per_step={args.prompts}", f"cluster.ranks_per_node={ranks_of(name)}"]
    if name == "late":
        late = json.dumps({"kind": environment, "most_s": MOST_S})
        found += ["env.kind=null", "env.path=benchmarks/lib/late_tools.py:Late", f"env.params={late}"]
    return [*found, *DIFFERENCES[name], *args.options]


def ranks_of(name: str) -> int:
    """Ranks of a run."""
    return 1 if name == "one" else 2


def kill(args: argparse.Namespace, environment: str) -> None:
    """A run of which one rank dies when it has cached five responses of the last step."""
    settings = [str(ENVIRONMENTS[environment]), "0", str(STEPS), "5", *options_of(args, environment, "killed")]
    try:
        launch(2, [str(WORKERS / "train_killed.py"), *settings])
    except SystemExit as error:
        if "ended with 9" not in str(error):  # SIGKILL
            raise
    else:
        raise SystemExit(f"{environment}: the run was not killed")


def run_world(args: argparse.Namespace, names: list[str]) -> None:
    """Runs of these names in all environments, those of one in one world, whose start takes longest."""
    listing = args.work / "jobs.json"
    for environment in args.environments:
        missing = [name for name in names if not is_done(args, environment, name)]
        if missing:
            config = str(ENVIRONMENTS[environment])
            listing.write_text(json.dumps([[config, options_of(args, environment, name), None] for name in missing]))
            launch(ranks_of(names[0]), [str(WORKERS / "train_many.py"), str(listing)])


def is_done(args: argparse.Namespace, environment: str, name: str) -> bool:
    """Whether the run has its last checkpoint."""
    return (args.work / f"{environment}-{name}/checkpoints/step-{STEPS:06d}").exists()


def row_of(args: argparse.Namespace, environment: str, name: str) -> dict[str, Any]:
    """A run's digests, and figures that show what happened in it."""
    folder = args.work / f"{environment}-{name}"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("env/turns", "env/failures", "engine/given_tokens", "rollout_cache/reused", "spec/accept_length")
    steps = [{key: row.get(key) for key in kept} for row in lines if "time/step" in row]
    return {"environment": environment, "run": name, "steps": steps, **digests(folder, STEPS)}


def summarize(rows: Rows) -> dict[str, float]:
    """The summary that the module's docstring lists."""
    summary: dict[str, float] = {}
    of = {(row["environment"], row["run"]): row for row in rows}
    for (environment, name), row in of.items():
        if name == "off":
            summary[f"turns_{environment}"] = statistics.mean(step["env/turns"] for step in row["steps"])
        else:
            keys = COMPARED.get(name, (*RESPONSES, "weights"))
            summary[f"{name}_{environment}"] = float(all(row[key] == of[environment, "off"][key] for key in keys))
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="off and on only, two prompts a step")
    parser.add_argument("--environments", nargs="+", choices=[*ENVIRONMENTS], default=[*ENVIRONMENTS])
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--work", type=Path, help="folder for the runs, which keeps complete ones; default: temporary")
    parser.add_argument("--options", nargs="*", default=[], help="overrides for all runs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if set(args.environments) & set(CONFIGS):
        make_tool_policy()
    worlds = [["off", "on", "late"], ["one"], ["killed"], ["vllm"]]
    if args.quick:
        args.prompts, worlds = 2, [["off", "on"]]
    elif find_python(VllmSection()) is None:
        worlds.pop()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as scratch:
        args.work = args.work or Path(scratch)
        for names in worlds:
            if names == ["killed"]:
                for environment in args.environments:
                    if not is_done(args, environment, "killed"):
                        kill(args, environment)
            run_world(args, names)
            rows += [row_of(args, environment, name) for environment in args.environments for name in names]
            write_record(args.out, rows, summarize(rows))
            print(f"done: {', '.join(names)}", flush=True)
    for name, value in summarize(rows).items():
        print(f"{name:28s} {value:10.3f}")
    if any(value != 1.0 for name, value in summarize(rows).items() if not name.startswith("turns")):
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()

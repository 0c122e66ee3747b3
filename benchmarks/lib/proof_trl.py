"""The same RL job in TRL and here: seconds of a step side by side, and accuracy after as many steps.

    python benchmarks/lib/proof_trl.py [--quick] [--learn 30] [--model DIR --drafter DIR] --out r.json
    python benchmarks/lib/proof_trl.py --config benchmarks/lib/calculator.yaml --model runs/tool-policy/policy ..

TRL's GRPOTrainer runs in an environment of its own (`make bench-trl`), on as many processes of one thread as this
project has ranks, over gloo. Both start from the same policy and get the same prompts in the same order, this project's
reward functions, group size, temperature, response length, loss (GRPO: mean over tokens, then over responses; no KL),
AdamW, warm-up and gradient clipping, in fp32. TRL generates with `transformers`; it has no drafter. The sides take
turns (A B A B), each turn a job of its own from the starting policy; `vs_trl` is the median over turns and steps of
TRL's seconds over ours for the same step. Start-up, evaluation and checkpoints are not in a step's seconds, on either
side. With a configuration of tools (`lib/calculator.yaml`, after `lib/tool_policy.py`) TRL calls them through its
`environment_factory`: the same answers, the same tokens around them (`trl_tools.py`).

`--learn N` then trains both for N steps, TRL for at most `--limit` seconds and this project for as many steps as TRL
got to, and measures both policies with `megatron-tlt eval` on the configuration's held-out prompts.

Rows: {"part": "speed" | "learn", "side", "turn", "step", "seconds", "reward", "mean_length"}, with tools also "turns"
(of the policy in a trajectory), and, after "learn", {"part": "eval", "side", "steps", "accuracy", "stderr"}. Summary:
`vs_trl`, `trl_step_s`, `our_step_s`; with `--learn` also `learn_steps`, `trl_accuracy`, `our_accuracy`,
`accuracy_gap_se` (ours minus TRL's in standard errors of the difference) and for each SIDE `SIDE_learn_step_s` (seconds
of a step, median; the sides do not take turns), `SIDE_first_reward` and `SIDE_last_reward` (means of three steps).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.bench_record import ROOT, write_record
from benchmarks.lib.prompt_rows import write_rows
from megatron_tlt.config.actor import ADAM_EPS
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config

ADVANTAGE_EPS = 1e-4  # what TRL adds to a group's standard deviation; it has no setting for it
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """One RL job for both sides."""

    config: Config
    config_path: Path
    overrides: tuple[str, ...]
    folder: Path  # scratch
    ranks: int
    trl_python: Path
    micro_batch: int  # responses of one process in one forward and backward of TRL
    continuous_batching: bool

    def open_folder(self, name: str) -> Path:
        """A new folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))


def check_same(config: Config) -> None:
    """Raises SystemExit for settings that the two sides do not share."""
    algorithm, rollout, optimizer = config.algorithm, config.rollout, config.optimizer
    wanted = {
        "algorithm.name": (algorithm.name, "grpo"),
        "algorithm.kl_coef": (algorithm.kl_weight, 0.0),
        "algorithm.entropy_coef": (algorithm.entropy_coef, 0.0),
        "algorithm.mini_batches": (algorithm.mini_batches, 1),
        "algorithm.dynamic_sampling": (algorithm.dynamic_sampling, False),
        "algorithm.overlong_buffer": (algorithm.overlong_buffer, 0),
        "algorithm.mask_truncated": (algorithm.mask_truncated, False),
        "rollout (top_k, top_p, min_p)": ((rollout.top_k, rollout.top_p, rollout.min_p), (0, 1.0, 0.0)),
        "rollout.stop": (rollout.stop, ()),
        "rollout.dtype": (rollout.dtype, "fp32"),
        "actor.dtype": (config.actor.dtype, "fp32"),
        "optimizer.name": (optimizer.name, "adam"),
        "optimizer.schedule": (optimizer.schedule, "constant"),
        "optimizer.weight_decay": (optimizer.weight_decay, 0.0),  # parameter groups differ
    }
    if config.env is not None:  # TRL's environments are tools, and its turns have no limit of their own
        wanted |= {
            "env.kind in (calculator, python)": (config.env.kind in ("calculator", "python"), True),
            "env.max_turn_tokens": (config.env.max_turn_tokens, None),
            "env.tool_role": (config.env.tool_role, "user"),
        }
    others = [f"{name} is {value!r}, not {same!r}" for name, (value, same) in wanted.items() if value != same]
    if others:
        raise SystemExit(f"not compared with TRL: {'; '.join(others)}")


def write_job(work: Work, folder: Path, steps: int, limit_s: float, save: Path | None) -> Path:
    """Prompts of so many steps and the file that `trl_worker.py` reads."""
    from megatron_tlt.data.prompts import build_prompts
    from megatron_tlt.data.tokenizer import HFTokenizer

    config = work.config
    tokenizer = HFTokenizer(config.model.path)
    stream = build_prompts(config.data, "train", tokenizer, config.train.seed)
    write_rows(stream.next_batch(steps * config.train.prompts_per_step), config.data, folder / "rows.jsonl")
    algorithm, optimizer = config.algorithm, config.optimizer
    responses = config.train.prompts_per_step * config.rollout.samples_per_prompt
    job = {
        "rows": str(folder / "rows.jsonl"),
        "out": str(folder / "result.json"),
        "scratch": str(folder / "trainer"),
        "save": None if save is None else str(save),
        "model": config.model.path,
        "steps": steps,
        "limit_s": limit_s,
        "prompts_per_step": config.train.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "micro_batch": min(work.micro_batch, responses // work.ranks),
        "continuous_batching": work.continuous_batching,
        "max_tokens": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "clip": [0.2 if c is None else c for c in (algorithm.ratio_clip_low, algorithm.ratio_clip_high)],
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": ADAM_EPS,
        "warmup_steps": optimizer.warmup_steps,
        "clip_grad": optimizer.clip_grad,
        "seed": config.train.seed,
        "rewards": config.rewards.model_dump(mode="json"),
        "env": config.env and config.env.model_dump(mode="json"),
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(command: list[str], log: Path, **environment: str) -> None:
    """Runs a job at the root of the repository. Raises SystemExit with the end of its output if it fails."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env = {**os.environ, **threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **environment}
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-4000:]}")


def train_trl(work: Work, steps: int, limit_s: float = math.inf, save: Path | None = None) -> Rows:
    """TRL's steps; fewer than asked for where the limit, in seconds, ended it."""
    folder = work.open_folder("trl")
    job = write_job(work, folder, steps, limit_s, save)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(work.ranks)]
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    worker = [str(ROOT / "benchmarks/lib/trl_worker.py"), str(job)]
    offline = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    call([str(work.trl_python), *torchrun, *master, *worker], folder / "log", **offline)
    result = json.loads((folder / "result.json").read_text())
    return [
        {
            "side": "trl",
            "step": step,
            "seconds": seconds,
            "reward": line["reward"],
            "mean_length": line["completions/mean_length"],
            **({"turns": 1 + line["tools/call_frequency"]} if "tools/call_frequency" in line else {}),
        }
        for step, (seconds, line) in enumerate(zip(result["seconds"], result["logs"], strict=True), 1)
    ]


def train_here(work: Work, steps: int, evaluate: bool = False) -> tuple[Rows, dict[str, float]]:
    """This project's steps and, with `evaluate`, the figures of the evaluation after the last one."""
    folder = work.open_folder("ours")
    every = steps if evaluate else 0
    options = [f"train.num_steps={steps}", f"train.run_dir={folder}/run", f"eval.every={every}"]
    options += ["checkpoint.every=0", "checkpoint.resume=never"]
    call(launcher(work, "train", *work.overrides, *options), folder / "log")
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rows = [
        {
            "side": "ours",
            "step": line["step"],
            "seconds": line["time/step"],
            "reward": line["reward/mean"],
            "mean_length": line["length/mean"],
            **({"turns": line["env/turns"]} if "env/turns" in line else {}),
        }
        for line in lines
        if "time/step" in line
    ]
    evaluations = {line["step"]: line for line in lines if "eval/pass@1" in line}
    return rows, evaluations.get(steps, {})


def launcher(work: Work, command: str, *options: str) -> list[str]:
    """A command of this project on all ranks."""
    start = [str(ROOT / "launch/local.sh"), "-n", str(work.ranks), "--cmd", command]
    return [*start, str(work.config_path), *options]


def compare_speed(work: Work, turns: int, steps: int) -> Rows:
    """Rows of both sides, which take turns."""
    rows: Rows = []
    for turn in range(turns):
        for side in (train_here(work, steps)[0], train_trl(work, steps)):
            rows += [{"part": "speed", "turn": turn, **row} for row in side]
            for row in side:
                print(
                    f"turn {turn} {row['side']:5s} step {row['step']:3d} {row['seconds']:8.2f} s", flush=True
                )
    return rows


def compare_learning(work: Work, steps: int, limit_s: float) -> Rows:
    """Rows of both learning curves and of both policies' evaluations."""
    saved = work.folder / "trl-policy"
    trl = train_trl(work, steps, limit_s, saved)
    done = len(trl)
    result = work.folder / "trl-eval.json"
    arguments = [*work.overrides, f"model.path={saved}", "rollout.speculation.drafter=none"]
    arguments.append("idle.train_drafter=false")
    arguments.append("idle.pre_rollout=false")
    call(launcher(work, "eval", *arguments, "--out", str(result), "--overwrite"), work.folder / "eval.log")
    evaluation = json.loads(result.read_text())
    ours, own = train_here(work, done, evaluate=True)
    rows: Rows = [{"part": "learn", "turn": 0, **row} for row in [*trl, *ours]]
    accuracies = {
        "trl": (evaluation["pass_at"]["1"], evaluation["stderr"]),
        "ours": (own["eval/pass@1"], own["eval/stderr"]),
    }
    for side, (accuracy, stderr) in accuracies.items():
        rows.append({"part": "eval", "side": side, "steps": done, "accuracy": accuracy, "stderr": stderr})
        print(f"{side:5s} after {done} steps: accuracy {accuracy:.3f} +- {stderr:.3f}", flush=True)
    return rows


def summarize(rows: Rows) -> dict[str, float]:
    """The summary that the module's docstring lists."""
    summary: dict[str, float] = {}
    seconds = {
        side: {
            (r["turn"], r["step"]): r["seconds"] for r in rows if (r["part"], r["side"]) == ("speed", side)
        }
        for side in ("trl", "ours")
    }
    if shared := seconds["trl"].keys() & seconds["ours"].keys():
        summary["vs_trl"] = statistics.median(seconds["trl"][k] / seconds["ours"][k] for k in shared)
        summary["trl_step_s"] = statistics.median(seconds["trl"].values())
        summary["our_step_s"] = statistics.median(seconds["ours"].values())
    of = {row["side"]: row for row in rows if row["part"] == "eval"}
    if of:
        gap = of["ours"]["accuracy"] - of["trl"]["accuracy"]
        summary["learn_steps"] = of["trl"]["steps"]
        summary["trl_accuracy"], summary["our_accuracy"] = of["trl"]["accuracy"], of["ours"]["accuracy"]
        summary["accuracy_gap_se"] = gap / math.hypot(of["ours"]["stderr"], of["trl"]["stderr"])
        for side in of:
            curve = [row for row in rows if (row["part"], row["side"]) == ("learn", side)]
            summary[f"{side}_learn_step_s"] = statistics.median(row["seconds"] for row in curve)
            for name, part in (("first", curve[:3]), ("last", curve[-3:])):
                summary[f"{side}_{name}_reward"] = statistics.mean(row["reward"] for row in part)
    return summary


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn of one step")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/demo-policy")
    parser.add_argument("--drafter", type=Path, default=ROOT / "assets/demo-drafter")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv/peers-trl/bin/python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=16, help="per_device_train_batch_size of TRL")
    parser.add_argument(
        "--continuous-batching", action="store_true", help="TRL's use_transformers_continuous_batching"
    )
    parser.add_argument("--turns", type=int, default=2, help="of each side; 0: no timing")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--learn", type=int, default=0, metavar="N", help="also train both for N steps")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds of TRL's N steps")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="a.b=c", help="settings of the job, both sides"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.trl_python.exists():
        parser.error(f"{args.trl_python} is not there: make bench-trl")
    return args


def run(args: argparse.Namespace) -> tuple[Rows, dict[str, float]]:
    """Rows and summary."""
    if args.quick:
        args.turns, args.steps = 1, 1
    overrides = (
        f"model.path={args.model}",
        f"rollout.speculation.drafter_path={args.drafter}",
        f"algorithm.advantage_eps={ADVANTAGE_EPS}",
        *args.set,
    )
    config = load_config(args.config, overrides)
    check_same(config)
    with tempfile.TemporaryDirectory() as folder:
        work = Work(
            config=config,
            config_path=args.config,
            overrides=overrides,
            folder=Path(folder),
            ranks=args.ranks,
            trl_python=args.trl_python,
            micro_batch=args.micro_batch,
            continuous_batching=args.continuous_batching,
        )
        rows = compare_speed(work, args.turns, args.steps)
        write_record(args.out, rows, summarize(rows))  # learning takes long
        if args.learn:
            rows += compare_learning(work, args.learn, args.limit)
    return rows, summarize(rows)


def main() -> None:
    args = parse_arguments()
    rows, summary = run(args)
    for name, value in summary.items():
        print(f"{name:28s} {value:10.3f}")
    write_record(args.out, rows, summary)


if __name__ == "__main__":
    main()

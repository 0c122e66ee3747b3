"""The same RL job in TRL and here: seconds of a step and learning curves side by side.

    python benchmarks/lib/proof_trl.py [--quick] [--model DIR --drafter DIR] [--eval-every K] --out r.json

TRL's GRPOTrainer runs in an environment of its own (`make bench-trl`), on as many processes of one thread as this
project has ranks, over gloo. Both start from the same policy and get the same prompts in the same order, this project's
reward functions, group size, temperature, response length, loss (GRPO: mean over tokens, then over responses; no KL),
AdamW, warm-up and gradient clipping, in fp32, or in bf16 with fp32 weights in the optimizer. TRL generates with
`transformers`; it has no drafter. The sides take turns (A B A B), each turn a job of its own from the starting policy.
Start-up, evaluation and checkpoints are not in a step's seconds, on either side.

Rows: {"part": "speed", "side", "turn", "step", "seconds", "reward", "mean_length"} and, with `--eval-every`, {"part":
"accuracy", "side", "turn", "step", "accuracy", "stderr"}: this project's evaluation of either side's policy on the
job's held-out prompts, after each so many steps and (of this side's turn, step 0) of the policy that both start from.
Summary: `vs_trl`, the median over turns and steps of TRL's seconds over ours for the same step; `trl_step_s`,
`our_step_s`; `trl_accuracy`, `our_accuracy`: of the last evaluation, the mean over turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.bench_record import LARGE_PAGES, ROOT, write_record
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
    eval_every: int  # steps; 0: no evaluations

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
        "rollout.dtype": (rollout.dtype, config.actor.dtype),
        "optimizer.name": (optimizer.name, "adam"),
        "optimizer.schedule": (optimizer.schedule, "constant"),
        "optimizer.weight_decay": (optimizer.weight_decay, 0.0),  # parameter groups differ
        "env": (config.env, None),
    }
    others = [f"{name} is {value!r}, not {same!r}" for name, (value, same) in wanted.items() if value != same]
    if others:
        raise SystemExit(f"not compared with TRL: {'; '.join(others)}")


def write_job(work: Work, folder: Path, steps: int) -> Path:
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
        "save_every": work.eval_every,
        "policies": str(folder / "policies"),
        "scratch": str(folder / "trainer"),
        "model": config.model.path,
        "bf16": config.actor.dtype == "bf16",
        "steps": steps,
        "prompts_per_step": config.train.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "micro_batch": min(work.micro_batch, responses // work.ranks),
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
    env = {**os.environ, **LARGE_PAGES, **threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **environment}
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-4000:]}")


def start_here(work: Work, command: str, options: list[str], log: Path) -> None:
    """Runs a command of this project on the job's ranks, its output into `log`."""
    start = [str(ROOT / "launch/local.sh"), "-n", str(work.ranks), "--cmd", command, str(work.config_path)]
    call([*start, *work.overrides, *options], log)


def train_trl(work: Work, steps: int) -> Rows:
    """TRL's steps, and the accuracy of the policies that it kept."""
    folder = work.open_folder("trl")
    job = write_job(work, folder, steps)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(work.ranks)]
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    worker = [str(ROOT / "benchmarks/lib/trl_worker.py"), str(job)]
    offline = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    call([str(work.trl_python), *torchrun, *master, *worker], folder / "log", **offline)
    result = json.loads((folder / "result.json").read_text())
    rows: Rows = [
        {
            "part": "speed",
            "step": step,
            "seconds": seconds,
            "reward": line["reward"],
            "mean_length": line["completions/mean_length"],
        }
        for step, (seconds, line) in enumerate(zip(result["seconds"], result["logs"], strict=True), 1)
    ]
    return rows + [accuracy(work, policy) for policy in sorted(folder.glob("policies/*"))]


def accuracy(work: Work, policy: Path) -> dict[str, Any]:
    """The row of a policy that TRL kept in a folder whose name is its step. The drafter is that of the policy that both
    sides start from; drafts change no response.
    """
    out = policy / "evaluation.json"
    options = [f"model.path={policy}", "rollout.speculation.allow_other_policy=true", f"--out={out}"]
    start_here(work, "eval", options, policy / "log")
    found = json.loads(out.read_text())
    return {
        "part": "accuracy",
        "step": int(policy.name),
        "accuracy": found["pass_at"]["1"],
        "stderr": found["stderr"],
    }


def train_here(work: Work, steps: int) -> Rows:
    """This project's steps and evaluations."""
    folder = work.open_folder("ours")
    options = [f"train.num_steps={steps}", f"train.run_dir={folder}/run", f"eval.every={work.eval_every}"]
    start_here(work, "train", [*options, "checkpoint.every=0", "checkpoint.resume=never"], folder / "log")
    rows: Rows = []
    for line in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines()):
        if "time/step" in line:
            values = {"seconds": line["time/step"], "reward": line["reward/mean"], "mean_length": line["length/mean"]}
            rows.append({"part": "speed", "step": line["step"], **values})
        if "eval/pass@1" in line:
            values = {"accuracy": line["eval/pass@1"], "stderr": line["eval/stderr"]}
            rows.append({"part": "accuracy", "step": line["step"], **values})
    return rows


def compare(work: Work, turns: int, steps: int) -> Rows:
    """Rows of both sides, which take turns."""
    rows: Rows = []
    for turn in range(turns):
        for side, train in (("ours", train_here), ("trl", train_trl)):
            for row in train(work, steps):
                rows.append({"side": side, "turn": turn, **row})
                value = f"{row['seconds']:8.2f} s" if row["part"] == "speed" else f"{row['accuracy']:8.3f} accuracy"
                print(f"turn {turn} {side:5s} step {row['step']:3d} {value}", flush=True)
    return rows


def summarize(rows: Rows) -> dict[str, float]:
    """The summary that the module's docstring lists."""
    of: dict[str, dict[tuple[int, int], float]] = {"trl": {}, "ours": {}}
    for row in rows:
        if row["part"] == "speed":
            of[row["side"]][row["turn"], row["step"]] = row["seconds"]
    ratios = [of["trl"][step] / of["ours"][step] for step in of["trl"].keys() & of["ours"].keys()]
    medians = {side: statistics.median(seconds.values()) for side, seconds in of.items()}
    found = {"vs_trl": statistics.median(ratios), "trl_step_s": medians["trl"], "our_step_s": medians["ours"]}
    judged = [row for row in rows if row["part"] == "accuracy"]
    last = max((row["step"] for row in judged), default=0)
    for name, side in (("trl_accuracy", "trl"), ("our_accuracy", "ours")):
        if ends := [row["accuracy"] for row in judged if row["side"] == side and row["step"] == last]:
            found[name] = statistics.fmean(ends)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of one step")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/quickstart.yaml")
    parser.add_argument("--model", type=Path, default=ROOT / "assets/demo-policy")
    parser.add_argument("--drafter", type=Path, default=ROOT / "assets/demo-drafter")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv/peers-trl/bin/python")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=16, help="per_device_train_batch_size of TRL")
    parser.add_argument("--turns", type=int, default=2, help="of each side")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--eval-every", type=int, default=0, metavar="K", help="steps between evaluations; 0: none")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="settings of the job, both sides")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.trl_python.exists():
        parser.error(f"{args.trl_python} is not there: make bench-trl")
    return args


def main() -> None:
    args = parse_arguments()
    if args.quick:
        args.turns, args.steps, args.eval_every = 1, 1, 1
    overrides = (
        f"model.path={args.model}",
        f"rollout.speculation.drafter_path={args.drafter}",
        f"algorithm.advantage_eps={ADVANTAGE_EPS}",
        *args.set,
    )
    config = load_config(args.config, overrides)
    check_same(config)
    folder = Path(tempfile.mkdtemp(prefix="proof-trl-"))
    given = args.ranks, args.trl_python, args.micro_batch, args.eval_every
    work = Work(config, args.config, overrides, folder, *given)
    rows = compare(work, args.turns, args.steps)
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:28s} {value:10.3f}")
    write_record(args.out, rows, summary)
    shutil.rmtree(folder)  # of a comparison that failed it stays: hours of steps and policies


if __name__ == "__main__":
    main()

"""TLT on against off on real ranks: the same responses, rewards and weights, and how much sooner.

    make proof                          # main: up to 16 minutes on 2 cores
    make proof ARGS="--parts main peers --out r.json"
    python benchmarks/proof.py [--quick] [--parts main peers] --out r.json

- main: the demo policy widened to `--sizes` (hidden sizes; the same responses, weights beyond a cache), few responses a
  replica with a long tail (`lib/proof.yaml` says why). Jobs with TLT on (eagle drafts and pre-rollouts; idle time
  trains the drafter and pre-rolls) and off (plain decoding of the same engine) take turns, A B A B (further sizes
  once). Parts of it run once: `drafter` (without pre-rollouts), `pre_rollouts` (without a drafter: from nothing) and
  `suffix` (nothing to train, no pre-rollouts). The first step of each job (cold caches, and a selector that has
  measured nothing) is not timed.
- peers: TRL and vLLM, where `make bench-trl` and `make bench-vllm` installed them.

Summary, of the size with the best `e2e`; with `_H` after the name, of hidden size H:
identical     1.0 if responses, rewards and final weights with optimizer are the same in all jobs of a size
rollout       seconds of rollouts with the wait for the slowest rank, off / on
e2e           seconds of steps, off / on; `e2e_limit`: if rollouts with TLT took no time
pre_rolled_accept  tokens that a request gets in a step whose draft was pre-rolled
recovered     share of idle seconds that trained the drafter or pre-rolled
accept_length tokens that a request gets in a step in which it has a draft
update_saved  share of the response tokens that need no update, their advantage being zero
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import proof_picture
from lib.bench_record import ROOT, read_record, write_record
from lib.larger_policy import widen, widen_drafter
from lib.on_off import DRAFTER, OFF, SPEC, job_row, judge, mean_phases, summarize, table
from lib.training_runs import Rows, train
from torch.backends.cpu import get_cpu_capability

sys.path.insert(0, str(ROOT))
from megatron_tlt.models.hf.config import ModelConfig

CONFIG = ROOT / "benchmarks/lib/proof.yaml"
POLICY = ROOT / "assets/demo-policy"
MODES = {
    "on": [f"{SPEC}.drafter=eagle", "idle.train_drafter=true"],
    "off": OFF,
    "drafter": [f"{SPEC}.drafter=eagle", "idle.train_drafter=true", "idle.pre_rollout=false"],
    "pre_rollouts": [*OFF, "idle.pre_rollout=true"],
    "suffix": [*OFF, f"{SPEC}.drafter=suffix"],
}
PARTS_OF_ON = ("drafter", "pre_rollouts", "suffix")
MLP = {128: 384, 256: 768, 512: 1536, 768: 2048}  # units by hidden size
PARAMETERS = {128: "2.4M", 256: "9.5M", 512: "38M", 768: "78M"}
GOALS = {"identical": 1.0, "pre_rollouts_rollout": 1.8, "pre_rollouts_e2e": 1.45, "pre_rolled_accept": 6.0}
GOALS |= {"rollout": 1.8, "e2e": 1.5} if get_cpu_capability() == "AVX2" else {"rollout": 2.3, "e2e": 1.7}
PEERS = {"trl": "lib/proof_trl.py", "vllm": "bench_rollout.py"}


class Bench:
    """The widened policies, and jobs on them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, args.work

    def policy(self, hidden: int) -> list[str]:
        """Options for the policy and the drafter of this hidden size; makes them the first time."""
        model, drafter = self.work / f"policy-{hidden}", self.work / f"drafter-{hidden}"
        if not drafter.is_dir():
            widen(POLICY, MLP[hidden], model, hidden_size=hidden, max_positions=2048)
            widen_drafter(DRAFTER, ModelConfig.from_hf(POLICY), ModelConfig.from_hf(model), drafter)
        return [f"model.path={model}", f"{SPEC}.drafter_path={drafter}"]

    def job(self, name: str, hidden: int, mode: str) -> Rows:
        """Rows of the timed steps of a job into WORK/NAME."""
        args, options = self.args, [*self.policy(hidden), *MODES[mode], *self.args.options]
        return train(self.work / name, CONFIG, args.steps, args.ranks, options, every=args.steps)[1:]


def main_part(bench: Bench) -> tuple[Rows, dict[str, float]]:
    """All sizes."""
    rows, summary = [], {}
    for hidden in bench.args.sizes:
        found = jobs_of_size(bench, hidden)
        figures = summarize(found)
        print(table(found, label(hidden)), *judge(figures, GOALS), sep="\n", flush=True)
        summary |= {f"{name}_{hidden}": value for name, value in figures.items()}
        rows += found
    best = max(bench.args.sizes, key=lambda hidden: summary[f"e2e_{hidden}"])
    names = [name.removesuffix(f"_{best}") for name in summary if name.endswith(f"_{best}")]
    chosen = {name: summary[f"{name}_{best}"] for name in names}
    chosen["identical"] = min(summary[f"identical_{hidden}"] for hidden in bench.args.sizes)
    if bench.args.picture is not None:
        there = {row["mode"] for row in rows if row["hidden"] == best}
        pictured = [mode for mode in ("off", "drafter", "on") if mode in there]
        runs = {mode: bench.work / f"{best}-{mode}" for mode in pictured}
        seconds = {mode: mean_phases([r for r in rows if (r["hidden"], r["mode"]) == (best, mode)]) for mode in runs}
        bench.args.picture.parent.mkdir(parents=True, exist_ok=True)
        bench.args.picture.write_text(proof_picture.draw(runs, seconds, chosen))
    return rows, {**chosen, "hidden": float(best), **summary}


def jobs_of_size(bench: Bench, hidden: int) -> Rows:
    """A row for each job of one policy: of the first size in several rounds and with `suffix`, of others once."""
    rows: Rows = []
    is_first = hidden == bench.args.sizes[0]
    for turn in range(bench.args.rounds if is_first else 1):
        modes = ["off", "on"] if turn % 2 == 0 else ["on", "off"]
        for mode in (*modes, *(PARTS_OF_ON if is_first and turn == 0 and bench.args.apart else ())):
            name, steps = f"{hidden}-{mode}", bench.args.steps
            timed = bench.job(name, hidden, mode)
            row = {"part": "main", "hidden": hidden, "round": turn, **job_row(mode, timed, bench.work / name, steps)}
            rows.append(row)
            took = sum(row["phases"].values())
            print(f"{label(hidden)}, {mode}, round {turn}: {took:.2f} s a step", flush=True)
    return rows


def label(hidden: int) -> str:
    """A size as the tables name it."""
    return f"{PARAMETERS[hidden]} parameters (hidden size {hidden})"


def peers_part(bench: Bench) -> tuple[Rows, dict[str, float]]:
    """The comparisons with TRL and vLLM: each a script with a record of its own; one that is not installed is named."""
    rows, summary = [], {}
    for name, script in PEERS.items():
        if not (ROOT / f".venv/peers-{name}/bin/python").exists():
            print(f"{name}: not installed (make bench-{name}), left out", flush=True)
            continue
        out = bench.work / f"{name}.json"
        quick = ["--quick"] if bench.args.quick else []
        command = [sys.executable, str(ROOT / "benchmarks" / script), *quick, "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True)
        found, figures = read_record(out)
        rows += [{"peer": name, **row} for row in found]
        summary |= figures
    return rows, summary


PARTS = {"main": main_part, "peers": peers_part}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, one round of 3 steps on and off")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=["main"])
    parser.add_argument("--sizes", nargs="+", type=int, choices=[*MLP], default=[512, 768], help="hidden sizes")
    parser.add_argument("--rounds", type=int, default=2, help="of the first size; of the others one, for time")
    parser.add_argument("--steps", type=int, default=6, help="of a job; the first is not timed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-parts-of-on", dest="apart", action="store_false")
    parser.add_argument("--options", nargs="*", default=[], help="overrides for all jobs")
    parser.add_argument("--work", type=Path, help="folder for the jobs; by default a temporary one")
    parser.add_argument("--picture", type=Path, help="SVG file of part main")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.quick:
        args.sizes, args.rounds, args.steps, args.apart = args.sizes[:1], 1, 3, False
    rows: Rows = []
    summary: dict[str, float] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        args.work = (args.work or Path(scratch)).resolve()
        bench = Bench(args)
        for part in args.parts:
            found, figures = PARTS[part](bench)
            rows, summary = rows + found, summary | figures
            write_record(args.out, rows, summary)
            if part != "main":  # which prints its own, with what they mean
                print(*(f"{name:52s}{value:8.3f}" for name, value in figures.items()), sep="\n")
    written = [str(path) for path in (args.out, args.picture) if path is not None]
    print(f"{(time.monotonic() - started) / 60:.1f} minutes; written: {', '.join(written) or 'nothing'}")


if __name__ == "__main__":
    main()

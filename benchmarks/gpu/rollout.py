"""Plain rollouts of the embedded engine against transformers' continuous batching, and against the device's limits.

    python benchmarks/gpu/rollout.py --shape qwen2.5-7b --out r.json       # random weights of that shape
    python benchmarks/gpu/rollout.py --model DIR --out r.json              # your own model
    python benchmarks/gpu/rollout.py --device cpu --quick --out r.json     # the demo policy; shows that it runs

Both sides have the same weights, prompts and lengths (no end of sequence), sample at temperature 1, and take turns in
one process; after a round that only warms up, figures are medians of `--repeats` rounds. The bounds are those of
`bounds.py`: of memory bandwidth (the limit at batch 1) and of compute (at batch 256). The device's figures are those
of its data sheet if it is in the table there, else of a copy and a matrix product measured here; `--bandwidth` and
`--tflops` replace both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]

from bounds import Device, bound, data_sheet, mean_context  # noqa: E402
from lib.bench_record import write_record  # noqa: E402

from megatron_tlt.backends.build import build_backend  # noqa: E402
from megatron_tlt.config.load import load_config  # noqa: E402
from megatron_tlt.config.model import ModelSection  # noqa: E402
from megatron_tlt.config.rollout import RolloutSection  # noqa: E402
from megatron_tlt.models.base import DTYPES  # noqa: E402
from megatron_tlt.models.config import ModelConfig  # noqa: E402
from megatron_tlt.models.loader import save_hf  # noqa: E402
from megatron_tlt.types import SamplingParams  # noqa: E402

SIDES = ("embedded", "transformers")
Run = Callable[[list[list[int]], int], float]  # prompts, tokens of each answer -> seconds


@dataclass(frozen=True)
class Setup:
    """What all sides share."""

    model: Path
    config: ModelConfig
    device: torch.device
    dtype: str
    batches: list[int]
    prompt: int  # tokens
    tokens: int  # of each answer
    repeats: int
    kv_mib: int


def embedded(setup: Setup) -> Run:
    """Our engine, without speculation."""
    rollout = RolloutSection(
        dtype=setup.dtype,  # type: ignore[arg-type]
        max_running_requests=max(setup.batches),
        kv_cache_mib=setup.kv_mib,
    )
    section = ModelSection(path=str(setup.model), max_context=setup.prompt + setup.tokens)
    engine = build_backend(rollout, section, device=setup.device, load_weights=True).engine

    def run(prompts: list[list[int]], tokens: int) -> float:
        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), i)
        finished = engine.run()
        seconds = time.perf_counter() - started
        assert [len(r.output) for r in finished] == [tokens] * len(prompts)
        return seconds

    return run


def transformers(setup: Setup) -> Run:
    """transformers' continuous batching (`generate_batch`) over its paged cache."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    net = AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=DTYPES[setup.dtype], attn_implementation="sdpa"
    )
    net.to(setup.device).eval()
    is_cuda = setup.device.type == "cuda"
    # On CPU the cache would take most of the machine's memory.
    cache = {} if is_cuda else {"num_blocks": 64, "max_batch_tokens": 256}

    def run(prompts: list[list[int]], tokens: int) -> float:
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        started = time.perf_counter()
        out = net.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**cache),
            progress_bar=False,
            warmup=is_cuda,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - started
        assert [len(o.generated_tokens) for o in out.values()] == [tokens] * len(prompts)
        return seconds

    return run


def compare(sides: dict[str, Run], setup: Setup, batch: int) -> list[dict[str, Any]]:
    """Rows of one batch size: tokens a second of every side, and ours over theirs in each round."""
    generator = torch.Generator().manual_seed(batch)
    shape = (setup.repeats + 1, batch, setup.prompt)
    prompts = torch.randint(1, setup.config.vocab_size, shape, generator=generator).tolist()
    for run in sides.values():
        run(prompts[0], setup.tokens)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn, work in enumerate(prompts[1:]):
        for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            rates[name].append(batch * setup.tokens / sides[name](work, setup.tokens))
    return [
        {"batch": batch, "side": name, "tokens_per_s": statistics.median(found), "min": min(found)}
        | {"max": max(found), "repeats": len(found)}
        | {
            "embedded_over_it": statistics.median(
                a / b for a, b in zip(rates["embedded"], found, strict=True)
            )
        }
        for name, found in rates.items()
    ]


def summarize(rows: Sequence[dict[str, Any]], setup: Setup, device: Device) -> dict[str, float]:
    """Against the other side, and against the bounds."""
    summary: dict[str, float] = {"bandwidth_gb_s": device.bandwidth / 1e9, "tflops": device.flops / 1e12}
    context, element = mean_context(setup.prompt, setup.tokens), DTYPES[setup.dtype].itemsize
    for batch in setup.batches:
        found = {row["side"]: row for row in rows if row["batch"] == batch}
        rate = found["embedded"]["tokens_per_s"]
        limit = bound(setup.config, device, batch, context, element)
        summary[f"tokens_per_s_{batch}"] = rate
        if "transformers" in found:
            summary[f"vs_transformers_{batch}"] = found["transformers"]["embedded_over_it"]
        summary[f"of_bandwidth_bound_{batch}"] = rate / limit.by_bandwidth
        summary[f"of_compute_bound_{batch}"] = rate / limit.by_compute
        summary[f"of_bound_{batch}"] = rate / limit.tokens_per_s
    return summary


def measured(device: torch.device, dtype: torch.dtype, quick: bool) -> Device:
    """Bandwidth of a copy (read and write) and operations of a square product: medians of a few."""
    is_cuda, size = device.type == "cuda", (4 << 20) if quick else (1 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if is_cuda else 512
    a = torch.ones(n, n, dtype=dtype, device=device)

    def seconds(step: Callable[[], object]) -> float:
        taken = []
        for _ in range(7):
            if is_cuda:
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            step()
            if is_cuda:
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[2:])

    copy, product = seconds(lambda: target.copy_(source)), seconds(lambda: a @ a)
    return Device(name_of(device), 2 * size / copy, 2 * n**3 / product, "measured")


def name_of(device: torch.device) -> str:
    """The device's name."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def device_of(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Device:
    """The device's figures; given ones replace those of the data sheet or measured."""
    found = data_sheet(name_of(device)) or measured(device, dtype, args.quick)
    if args.bandwidth is None and args.tflops is None:
        return found
    bandwidth = found.bandwidth if args.bandwidth is None else args.bandwidth * 1e9
    flops = found.flops if args.tflops is None else args.tflops * 1e12
    return Device(found.name, bandwidth, flops, "given")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what `--quick` and the device imply filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="Hugging Face directory")
    which.add_argument("--shape", help="random weights of configs/models/NAME.yaml")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="the demo policy, a few tokens")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="default: 1 16 64 256")
    parser.add_argument("--prompt", type=int, default=None, help="prompt tokens, default 128")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of an answer, default 512")
    parser.add_argument("--repeats", type=int, default=None, help="default 5")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the device's memory")
    parser.add_argument("--tflops", type=float, help="dense TFLOP/s of the device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.sides[0] != "embedded":
        args.sides = ["embedded", *(s for s in args.sides if s != "embedded")]  # ratios are over it
    if args.quick and args.model is None and args.shape is None:
        args.model = ROOT / "assets" / "demo-policy"
    if args.model is None and args.shape is None:
        parser.error("--model DIR or --shape NAME is required without --quick")
    defaults = (
        ("batches", [1, 4], [1, 16, 64, 256]),
        ("prompt", 8, 128),
        ("tokens", 8, 512),
        ("repeats", 2, 5),
    )
    for name, quick, full in defaults:
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    if min(*args.batches, args.prompt, args.tokens, args.repeats) < 1:
        parser.error("--batches, --prompt, --tokens and --repeats must be at least 1")
    return args


def random_model(shape: str, folder: Path, dtype: torch.dtype) -> Path:
    """Random weights of `configs/models/SHAPE.yaml` as a Hugging Face directory."""
    wanted = load_config(ROOT / "configs" / "models" / f"{shape}.yaml").model.architecture
    assert wanted is not None
    fields = {name: getattr(wanted, name) for name in type(wanted).model_fields}
    family = fields["family"]
    config = ModelConfig(
        **fields, qk_norm=family == "qwen3", qkv_bias=family == "qwen2", max_position_embeddings=8192
    )
    generator = torch.Generator().manual_seed(0)
    weights = (
        (name, torch.randn(size, generator=generator).mul_(size[-1] ** -0.5).to(dtype))
        for name, size in config.parameter_shapes().items()
    )
    save_hf(folder, config, weights, dtype)
    return folder


def measure(args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], dict[str, float], Device]:
    """All batch sizes in order."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    model = args.model if args.shape is None else random_model(args.shape, work / "model", DTYPES[dtype])
    config = ModelConfig.from_hf(model)
    context = args.prompt + args.tokens
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPES[dtype].itemsize
    kv_mib = 2 + max(args.batches) * (context + 32) * per_token // 2**20
    setup = Setup(
        model,
        config,
        device,
        dtype,
        args.batches,
        args.prompt,
        args.tokens,
        args.repeats,
        int(kv_mib * 1.2) + 1,
    )
    known = device_of(args, device, DTYPES[dtype])
    sides = {name: {"embedded": embedded, "transformers": transformers}[name](setup) for name in args.sides}
    rows = []
    for batch in args.batches:
        rows += compare(sides, setup, batch)
        for row in rows[-len(sides) :]:
            ratio = f"embedded {row['embedded_over_it']:.2f} times it" if row["side"] != "embedded" else ""
            print(
                f"batch {batch:4d}  {row['side']:13s} {row['tokens_per_s']:12.1f} tokens/s  {ratio}",
                flush=True,
            )
    return rows, summarize(rows, setup, known), known


def main() -> None:
    """Measures, prints and writes."""
    args = parse_arguments()
    if args.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows, summary, known = measure(args, Path(scratch))
    figures = f"{known.bandwidth / 1e9:.0f} GB/s, {known.flops / 1e12:.2f} TFLOP/s"
    print(f"{known.name}: {figures} ({known.source})")
    for name, value in summary.items():
        print(f"{name:28s} {value:12.3f}")
    write_record(args.out, rows, summary, device=f"{known.name}, {figures} ({known.source})")


if __name__ == "__main__":
    main()

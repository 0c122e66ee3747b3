"""Which kind of drafter a policy should have: accepted length after the same seconds of training, seconds of a draft.

    python benchmarks/bench_drafter_kinds.py [--quick] --policy DIR --work W [--prompts 120] [--responses N]
        [--seconds 60,150,300] [--seeds 0 ..] [--kinds eagle dspark1 ..] [--parts record learn draft]
        [--with r1.json ..] [--out r.json]

Part `record`, once a folder W: the policy's responses to prompts of `lib/real.yaml` at temperature 1, two a prompt, for
training, and held-out ones at 1 and 0.7, with the states that any kind reads. Part `learn`: the online trainer with its
default settings on the first N responses, from the policy, one thread; seconds are processor time of training alone.
`accepted` is the drafted tokens of 7 that are accepted in a row on held-out responses, with the responses' own noise
(`training.measure`), `slots` the share of each slot's drafts that is accepted where the earlier slots were; a sample's
standard error is that of responses. Part `draft`: seconds of a draft of 7 behind 64 tokens, 3 new ones, for 1, 4 and 16
requests, over 4,096 and all tokens, best of 5. `--with`: earlier records whose rows go into this one (runs side by
side write records of their own); the summary has means over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.bench_record import ROOT, read_record, write_record
from torch import Tensor

sys.path.insert(0, str(ROOT))

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.load import load_config
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.drafters.model import DrafterConfig, DrafterModel
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence
from megatron_tlt.drafters.training.measure import MeasuredAcceptance, measure
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafters.training.pretrain import lookup_tables
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights, weight_reader
from megatron_tlt.trainer.models import push_policy
from megatron_tlt.types import GenerateCall, HiddenStateSample, SamplingParams
from tests.helpers.pairs import Rows as DraftRows

Rows = list[dict[str, Any]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"drafter": "eagle"},
    "eagle3": {"drafter": "eagle3"},
    "dspark1": {"drafter": "dspark", "block_layers": 1},
    "dspark2": {"drafter": "dspark", "block_layers": 2},
}
DRAFTED = 7
HELD_OUT = 80  # prompts a temperature
TEMPERATURES = (1.0, 0.7)


def shape_of(name: str, policy: ModelConfig, tokens: int | None = None) -> DrafterConfig:
    """A drafter over its default vocabulary, or `tokens` tokens."""
    section = SpeculationSection(**DRAFTERS[name], draft_vocab_size=tokens)
    return KINDS[section.drafter].fresh(section, policy)


def read_layers(policy: ModelConfig) -> tuple[int, ...]:
    """Layers that any of the drafters reads."""
    return tuple(sorted({layer for name in DRAFTERS for layer in shape_of(name, policy).aux_layers}))


# -- responses ----------------------------------------------------------------------------------------------------


def record(policy: Path, work: Path, count: int) -> None:
    """Writes the responses: two to each of `count` prompts, and one to each of others at each temperature."""
    shape, tokenizer = ModelConfig.from_hf(policy), HFTokenizer(policy)
    config = load_config(ROOT / "benchmarks/lib/real.yaml", [f"model.path={policy}"])
    section = RolloutSection(dtype="fp32", max_running_requests=16)
    model = ModelSection(path=str(policy), max_context=config.model.max_context)
    engine = build_backend(EngineOptions(section, model, tokenizer=tokenizer, keep_layers=read_layers(shape)))
    push_policy(policy, engine)
    for name, temperature in (("train", 1.0), ("held-1.0", 1.0), ("held-0.7", 0.7)):
        out = work / f"{name}.pt"
        if out.exists():
            continue
        source = build_prompts(config.data, "train" if name == "train" else "eval", tokenizer, 0)
        prompts = source.next_batch(count if name == "train" else HELD_OUT)
        found: list[HiddenStateSample] = []
        engine.collect_hidden_states(found.append)
        params = SamplingParams(temperature=temperature, max_tokens=config.rollout.max_tokens, seed=7)
        engine.generate(GenerateCall(prompts, params, 2 if name == "train" else 1))
        engine.collect_hidden_states(None)
        torch.save([(s.trajectory, s.key, s.hidden) for s in found], out)
        tokens = sum(s.trajectory.length - s.trajectory.response_start for s in found)
        print(f"record {name}: {len(found)} responses, {tokens} tokens", flush=True)


def read(
    name: str, work: Path, policy: ModelConfig, layers: tuple[int, ...], count: int | None = None
) -> list[HiddenStateSample]:
    """The first `count` recorded responses (None: all) with the states of `layers` and the final one."""
    h, recorded = policy.hidden_size, read_layers(policy)
    columns = [recorded.index(layer) for layer in layers] + [len(recorded)]
    out = []
    for trajectory, key, states in torch.load(work / f"{name}.pt", weights_only=False, mmap=True)[:count]:
        hidden = torch.cat([states[:, i * h : (i + 1) * h] for i in columns], -1)
        out.append(HiddenStateSample(trajectory, hidden, key))
    return out


# -- learning -----------------------------------------------------------------------------------------------------


def learn(
    policy: Path, work: Path, name: str, marks: list[float], seed: int, responses: int | None
) -> Iterator[dict[str, Any]]:
    """Accepted lengths at marks of seconds, of training on the first `responses` recorded ones (None: on all)."""
    shape = ModelConfig.from_hf(policy)
    config, tables = shape_of(name, shape), lookup_tables(policy, shape, torch.device("cpu"))
    source = work, shape, config.aux_layers
    held = {t: [DraftSequence.of(s) for s in read(f"held-{t}", *source)] for t in TEMPERATURES}
    samples = read("train", *source, responses)
    model = KINDS[config.kind].build_model(config)
    model.initialise(seed)
    model.start_from_policy(weight_reader(policy, shape))
    section = DrafterSection(online={"buffer_mib": 8192.0})
    trainer = OnlineDrafterTrainer(model, section, fresh=True, seed=seed)
    trainer.begin_step(0, lambda: tables)
    for sample in samples:
        trainer.buffer.add(sample)
    trainer.merge()  # chooses the vocabulary
    spent = 0.0
    for mark in marks:
        while spent < mark:
            began = time.process_time()
            trainer.train_step()
            spent += time.process_time() - began
        drafting = KINDS[config.kind].build_model(config)  # of the mean weights, as drafters are published
        drafting.load_full({**trainer._state.mean(), **dict(model.named_buffers())}.items())
        row = {"part": "learn", "kind": name, "responses": len(samples), "seed": seed, "seconds": mark}
        row["steps"] = trainer.trained_steps
        for temperature in TEMPERATURES:
            found = accepted(drafting, tables, held[temperature], temperature)
            row |= {f"{figure}_{temperature}": value for figure, value in found.items()}
        print(json.dumps(row), flush=True)
        yield row


def accepted(
    model: DrafterModel, tables: tuple[Tensor, Tensor], held: list[DraftSequence], temperature: float
) -> dict[str, Any]:
    """Mean accepted length over bases, the standard error of the ratio over responses, and the slots' shares."""
    how = {"steps": DRAFTED, "temperature": temperature, "batch_tokens": 1024, "window": 1024}
    each = [measure(model, *tables, [response], **how) for response in held]
    bases = np.array([m.bases for m in each])
    length = bases * np.array([m.accepted_length for m in each])
    mean = length.sum() / bases.sum()
    error = np.sqrt(((length - mean * bases) ** 2).sum()) / bases.sum()
    slots = sum(each, MeasuredAcceptance.empty(DRAFTED)).coupled
    return {"accepted": float(mean), "error": float(error), "slots": slots}


# -- drafting -----------------------------------------------------------------------------------------------------


def draft_rows(policy: Path, names: Sequence[str]) -> Rows:
    """Seconds of a draft, the feed of 3 new tokens included."""
    shape, rows = ModelConfig.from_hf(policy), []
    tables = dict(iter_weights(policy, shape))
    generator = torch.Generator().manual_seed(0)
    for name in names:
        for tokens in sorted({min(4096, shape.vocab_size), shape.vocab_size}):
            config = shape_of(name, shape, tokens)
            decoder = build_decoder(shape, aux_layers=config.aux_layers)
            decoder.load_weights(tables.items())
            drafter, model = KINDS[config.kind].build_decoder(decoder, config), KINDS[config.kind].build_model(config)
            model.initialise(0)
            drafter.load_weights(model.state_dict().items())
            drafter.refresh_head()
            for requests in (1, 4, 16):
                ids = [torch.randint(0, tokens, (65,), generator=generator).tolist() for _ in range(requests)]
                width = (len(config.aux_layers) + 1) * shape.hidden_size
                states = [torch.randn(64, width, generator=generator) for _ in range(requests)]
                running, best = DraftRows(drafter, ids, states), float("inf")
                running.draft(DRAFTED)
                for _ in range(5):
                    running.rows.synced[:] -= 3
                    began = time.process_time()
                    running.draft(DRAFTED)
                    best = min(best, time.process_time() - began)
                row = {"part": "draft", "kind": name, "tokens": tokens, "requests": requests, "seconds": best}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


# -- the record ---------------------------------------------------------------------------------------------------


def summary_of(rows: Rows) -> dict[str, float]:
    """Accepted lengths by kind, responses, seconds and temperature, means over seeds; milliseconds of a draft by kind,
    tokens and requests.
    """
    figures: dict[str, list[float]] = {}
    for row in rows:
        if row["part"] == "draft":
            figures[f"draft_ms_{row['kind']}_{row['tokens']}_{row['requests']}"] = [1e3 * row["seconds"]]
            continue
        for t in TEMPERATURES:
            name = f"accepted_{row['kind']}_{row['responses']}r_{row['seconds']:g}s_t{t}"
            figures.setdefault(name, []).append(row[f"accepted_{t}"])
    return {name: statistics.mean(values) for name, values in figures.items()}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="4 prompts and second 1")
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--responses", type=int)
    parser.add_argument("--seconds", default="60,150,300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", choices=[*DRAFTERS], default=[*DRAFTERS])
    parts = ["record", "draft", "learn"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--with", dest="earlier", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.seconds = 4, "1"
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    rows: Rows = [row for path in args.earlier for row in read_record(path)[0]]
    if "record" in args.parts:
        record(args.policy, args.work, args.prompts)
    if "draft" in args.parts:
        rows += draft_rows(args.policy, args.kinds)
    write_record(args.out, rows, summary_of(rows))
    if "learn" in args.parts:
        marks = [float(x) for x in args.seconds.split(",")]
        for seed in args.seeds:
            kinds = [learn(args.policy, args.work, name, marks, seed, args.responses) for name in args.kinds]
            for found in zip(*kinds, strict=True):
                rows += found
                write_record(args.out, rows, summary_of(rows))


if __name__ == "__main__":
    main()

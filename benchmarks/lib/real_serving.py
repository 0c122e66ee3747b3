"""Serving of a trained policy with its exported drafter: an unchanged vLLM, and this engine on the same prompts.

Both decode greedily and draft the same number of tokens in every step, so their accepted lengths can be compared.
Figures: {"served_accept", "own_accept" (tokens a request gets in a step), "served_equal" (share of equal responses)}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.bench_record import ROOT

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config

DRAFTED, TOKENS, PROMPTS = 4, 96, 12
WORKER_CONTEXT = 256  # max_model_len of the worker
WORKER = ROOT / "tests/integration/workers/vllm_serving.py"


def serve(config: Config, policy: Path, drafter: Path, work: Path, python: str) -> dict[str, float]:
    """Exports `drafter` for vLLM below `work`, serves both there by `python`, and here. Raises SystemExit where vLLM
    fails.
    """
    from megatron_tlt.data.prompts import held_out_prompts
    from megatron_tlt.data.tokenizer import HFTokenizer

    found = held_out_prompts(config.data, HFTokenizer(policy), 2 * PROMPTS)
    prompts = [list(p.token_ids) for p in found if len(p.token_ids) + TOKENS <= WORKER_CONTEXT][:PROMPTS]
    own = serve_here(policy, drafter, prompts)
    theirs = serve_in_vllm(policy, drafter, prompts, work, python)
    equal = sum(a == b for a, b in zip(own["outputs"], theirs["outputs"], strict=True))
    return {
        "served_accept": theirs["accept_length"],
        "own_accept": own["accept_length"],
        "served_equal": equal / len(prompts),
    }


def serve_in_vllm(policy: Path, drafter: Path, prompts: list[list[int]], work: Path, python: str) -> dict[str, Any]:
    """What vLLM's process answers: {"outputs", "accept_length"}."""
    from megatron_tlt.backends.vllm.launch import _ENGINE
    from megatron_tlt.drafters.checkpoint import load_drafter

    exported = work / "vllm-drafter"
    if not exported.is_dir():
        options = ["--drafter", str(drafter), "--format", "vllm", "--out", str(exported), "--dtype", "fp32"]
        subprocess.run([sys.executable, str(ROOT / "tools/export_drafter.py"), *options], cwd=ROOT, check=True)
    job = {"model": str(policy), "drafter": str(exported), "method": load_drafter(drafter).config.kind}
    job |= {"draft_len": DRAFTED, "prompts": prompts, "max_tokens": TOKENS}
    jobs = work / "serving-jobs.json"
    jobs.write_text(json.dumps([job]))
    environment = {**os.environ, **_ENGINE, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [python, str(WORKER), str(jobs)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results or "error" in results[0]:
        raise SystemExit(f"vLLM: {results[0]['error'] if results else done.stderr[-4000:]}")
    return dict(results[0])


def serve_here(policy: Path, drafter: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """The same of the embedded engine."""
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.drafters.checkpoint import load_drafter
    from megatron_tlt.trainer.models import push_policy
    from megatron_tlt.types import GenerateCall, Prompt, SamplingParams

    speculation = {"drafter": load_drafter(drafter).config.kind, "drafter_path": str(drafter), "selector": "fixed"}
    section = RolloutSection.model_validate({"dtype": "fp32", "speculation": {**speculation, "draft_len": DRAFTED}})
    model = ModelSection(path=str(policy), max_context=max(map(len, prompts)) + TOKENS)
    backend = build_backend(EngineOptions(section, model))
    push_policy(policy, backend)
    given = [Prompt(i, "", tuple(p), "") for i, p in enumerate(prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    samples = backend.generate(GenerateCall(given, params, 1))
    length = backend.take_stats().speculation.accept_length
    return {"outputs": [list(s.token_ids) for s in samples], "accept_length": length}

"""What the suffix drafter gains by reading observations: the same rollout with a drafter that reads them and one that
skips them, on one engine of this process. For `bench_agents.py --given`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_tlt.rollout.request import Request

SPEC = "rollout.speculation"
SUFFIX = [f"{SPEC}.drafter=suffix", f"{SPEC}.drafter_path=null", f"{SPEC}.selector=fixed", "idle.train_drafter=false"]


@dataclass
class _Drawn:
    """A request without the tokens that it was given."""

    output: list[int]
    prompt: np.ndarray
    order: int
    prompt_id: int
    dataset_id: str
    slot: int = -1  # `_add` would count its tokens as read


@contextmanager
def given_tokens_skipped() -> Iterator[None]:
    """Suffix drafters add drawn tokens only: the trie goes on from the end of a turn to the next one's first token."""
    from megatron_tlt.rollout.spec.suffix import SuffixDrafter

    whole = SuffixDrafter._add

    def add(self: Any, request: Request) -> None:
        given = {place for begin, end in request.given for place in range(begin, end)}
        drawn = [token for place, token in enumerate(request.output) if place not in given]
        whole(self, _Drawn(drawn, request.prompt, request.order, request.prompt_id, request.dataset_id))  # type: ignore[arg-type]
        if request.slot >= 0:
            self._arrays.handles[request.slot] = self._sequences[request.order]
            self._arrays.num_read[request.slot] = len(request.output)

    with mock.patch.object(SuffixDrafter, "_add", add):
        yield


class Rollouts:
    """A configuration's first step, again and again."""

    def __init__(self, path: Path, options: list[str]):
        from megatron_tlt.backends.build import build_backend
        from megatron_tlt.backends.options import EngineOptions
        from megatron_tlt.config.load import load_config
        from megatron_tlt.config.root import Config
        from megatron_tlt.data.prompts import build_prompts
        from megatron_tlt.data.tokenizer import HFTokenizer
        from megatron_tlt.trainer.environments import Environments
        from megatron_tlt.trainer.sampling import sampling_params

        self.config = config = load_config(path, [*SUFFIX, *options], Config)
        tokenizer = HFTokenizer(config.model.path)
        alone = SimpleNamespace(rank=0, size=1, all_gather_object=lambda value: [value])
        assert config.env is not None
        self.environments = Environments(config.env, tokenizer, alone, chat=config.data.chat_template)  # type: ignore[arg-type]
        stream = build_prompts(config.data, "train", tokenizer, config.train.seed, self.environments.prompts)
        self.prompts = stream.next_batch(config.train.prompts_per_step)
        self.params = sampling_params(config)
        self._engine = EngineOptions(config.rollout, config.model, tokenizer=tokenizer, load_weights=True)
        self._build = build_backend

    def run(self, reads: bool) -> dict[str, Any]:
        """Counters of the rollout by a new engine, whose drafter reads given tokens or skips them."""
        from megatron_tlt.trainer.environments import turns_of
        from megatron_tlt.types import GenerateCall

        backend = self._build(self._engine)
        with turns_of(self.environments) as turns, nullcontext() if reads else given_tokens_skipped():
            begun = process_time()
            count = self.config.rollout.samples_per_prompt
            samples = backend.generate(GenerateCall(self.prompts, self.params, count, turns=turns))
            seconds = process_time() - begun
        stats = backend.take_stats()
        spec = stats.speculation
        return {
            "reads": reads,
            "cpu_s": seconds,
            "turns": stats.turns,
            "given_tokens": stats.given_tokens,
            "decoding_steps": stats.steps - stats.prefill_steps,
            "row_steps": spec.row_steps,
            "emitted_tokens": spec.emitted_tokens,
            "accept": spec.accept_length,
            "tokens": {(s.prompt_id, s.sample_index): s.token_ids for s in samples},
        }


def measure(path: Path, options: list[str], name: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of both drafters, and the summary's figures of NAME. Ends the benchmark if they give other responses."""
    rollouts = Rollouts(path, options)
    try:
        rows = [{"environment": name, **rollouts.run(reads)} for reads in (True, False)]
    finally:
        rollouts.environments.close()
    tokens = [row.pop("tokens") for row in rows]
    if tokens[0] != tokens[1]:
        raise SystemExit(f"{name}: drafts changed a response")
    reading, skipping = rows
    return rows, {
        f"accept_{name}": reading["accept"],
        f"accept_skipped_{name}": skipping["accept"],
        f"steps_saved_{name}": 1.0 - reading["row_steps"] / skipping["row_steps"],
    }

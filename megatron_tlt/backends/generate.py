"""`megatron-tlt generate`: JSONL prompts in, JSONL responses and a JSON report out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.data.chat import last_user_text
from megatron_tlt.data.fields import check_text, checked_answer, checked_messages
from megatron_tlt.data.json_files import read_json, without_spelling
from megatron_tlt.data.prompts import NO_ENV, EnvPrompts, encode_prompt, env_seed
from megatron_tlt.data.sources import Row, errors_at
from megatron_tlt.errors import ConfigError, DataError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.jsonl import JsonRow
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.types import GenerateCall, Prompt

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.interfaces import TurnSource
    from megatron_tlt.types import EngineStats, Sample, SamplingParams


def generate_file(
    model_dir: Path,
    prompts: Sequence[Prompt],
    out_jsonl: Path,
    params: SamplingParams,
    tokenizer: HFTokenizer | None,
    *,
    n: int = 1,
    stats_path: Path | None = None,
    rollout: RolloutSection | None = None,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    turns: TurnSource | None = None,
    more_of: Callable[[Sample], JsonRow] = lambda _: {},
) -> EngineStats:
    """Generates `n` responses to each of `prompts` (see `read_prompts`), and writes `out_jsonl` at the end, whole.

    Output lines, by prompt and sample: prompt_index, sample_index, text, token_ids, finish_reason and what `more_of`
    returns. The prompt's index is its id in the sampling key. `rollout`: the engine; its sampling fields are not read.
    `turns`: environments; text is then that of the last turn. All ranks of a tensor-parallel group call this; its rank
    0 writes. Raises DataError naming file and line, ConfigError, CheckpointError, BackendError.
    """
    ranks = tp.size if tp is not None else 1
    section = (rollout or RolloutSection()).model_copy(update={"tp": ranks})
    model = ModelSection(path=str(model_dir), max_context=_context(prompts, params, model_dir))
    backend = build_backend(
        EngineOptions(section, model, device=device, tokenizer=tokenizer, tp=tp, local_ranks=ranks, load_weights=True)
    )
    try:
        started = time.perf_counter()
        with closing(build_progress("auto", 0, 0 if tp is None else tp.rank)) as progress:
            call = GenerateCall(prompts, params, n, turns=turns)
            samples = backend.generate(progress.watched(call, "generate: responses", len(prompts) * n))
        stats = replace(backend.take_stats(), seconds=time.perf_counter() - started)
        if tp is None or tp.rank == 0:
            write_atomically(out_jsonl, map(partial(_line, more_of), samples))
            if stats_path is not None:
                write_atomically(stats_path, [stats_report(stats, backend)])
    finally:
        backend.close()
    return stats


def _context(prompts: Sequence[Prompt], params: SamplingParams, model_dir: Path) -> int:
    """Tokens of the longest prompt and its response. Raises DataError, ConfigError if the model has fewer positions."""
    limit = ModelConfig.from_hf(model_dir).max_position_embeddings
    longest = max(prompts, key=lambda p: len(p.token_ids))
    count = len(longest.token_ids)
    room = limit - count
    if room < 1:
        raise DataError(f"{longest.dataset_id}: {count} tokens, but the model has {limit} positions")
    if params.max_tokens > room:
        allowed = f"at most {room}: the longest prompt and its response must fit in the model's {limit} positions"
        raise ConfigError.of("max_tokens", params.max_tokens, allowed)
    return count + params.max_tokens


def read_prompts(
    path: Path, tokenizer: HFTokenizer | None, chat: bool, env: EnvPrompts = NO_ENV, seed: int = 0
) -> list[Prompt]:
    """The prompts of a JSONL file; `prompt_id` counts them from 0 (empty lines are skipped).

    Lines: {"prompt": text} or {"token_ids": [ids]}; an environment also sees their "answer" and, as metadata, the other
    fields. `chat`: prompts, also lists of messages, are wrapped in the chat template. `env`: what environments add,
    with seeds from `seed`.

    Raises DataError naming file and line, EnvError for a prompt that the environment refuses.
    """
    prompts: list[Prompt] = []
    rows: list[Row] = []
    for record, number in zip(*read_json(path, spelled=True), strict=True):
        where = f"{path}:{number}"
        row, token_ids = _parse(record, where, tokenizer, chat, env)
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens")
        rows.append(row)
        prompt_id = len(prompts)
        fields = (row.prompt, row.answer, row.task, row.metadata, env_seed(seed, prompt_id))
        prompts.append(Prompt(prompt_id, where, token_ids, *fields))
    if not prompts:
        raise DataError(f"{path}: no prompts")
    if env.openings is None or tokenizer is None:
        return prompts
    for number, text in enumerate(env.openings(prompts)):
        if text is not None:
            if not rows[number].prompt:
                raise DataError(f"{rows[number].dataset_id}: the environment's text cannot be added to token_ids: "
                                "give a prompt")  # fmt: skip
            check_text(text, "reset", rows[number].dataset_id)
            row = rows[number].with_opening(text)
            ids = _encode(row, tokenizer, chat, env)
            prompts[number] = replace(prompts[number], text=row.prompt, token_ids=ids)
    return prompts


def _line(more_of: Callable[[Sample], JsonRow], sample: Sample) -> str:
    """A JSON object."""
    record = {
        "prompt_index": sample.prompt_id,
        "sample_index": sample.sample_index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
    }
    return json.dumps(record | more_of(sample), ensure_ascii=False)


def stats_report(stats: EngineStats, backend: EmbeddedBackend) -> str:
    """`EngineStats` with rates, the decoder's kind and the size of its cache."""
    spec = stats.speculation
    report = {
        **asdict(stats),
        "speculation": {
            **asdict(spec),
            "accept_length": spec.accept_length,
            "accept_rate_at": [a / d for a, d in zip(spec.accepted_at, spec.drafted_at, strict=True) if d],
            "accept_length_by_batch": {
                str(running): emitted / rows for running, (rows, emitted) in sorted(spec.by_batch.items())
            },
        },
        "tokens_per_s": stats.generated_tokens / stats.seconds if stats.seconds else 0.0,
        "decoder": backend.engine.runner.decoder.kind,
        "kv_cache_blocks": backend.engine.blocks.num_blocks,
        "graphs": backend.engine.graph_report(),
    }
    return json.dumps(report, indent=1)


def _encode(row: Row, tokenizer: HFTokenizer, chat: bool, env: EnvPrompts) -> tuple[int, ...]:
    with errors_at(row.dataset_id):
        return tuple(encode_prompt(tokenizer, row.messages or row.prompt, chat, None, env.tools))


def _parse(
    record: dict[str, Any], where: str, tokenizer: HFTokenizer | None, chat: bool, env: EnvPrompts
) -> tuple[Row, tuple[int, ...]]:
    keys = {"prompt", "token_ids"} & record.keys()
    if len(keys) != 1:
        found = ", ".join(map(repr, record)) or "none"
        raise DataError(f'{where}: an object with either "prompt" or "token_ids" is needed, its fields: {found:.80}')
    key = keys.pop()
    value = record.pop(key)
    answer = checked_answer(record.pop("answer", None), "answer", where)
    check_text(value, key, where)
    row = Row(where, "", answer, "default", without_spelling(record))
    if key == "prompt" and tokenizer is None:
        raise DataError(f'{where}: "prompt" needs a tokenizer and the model has none; give "token_ids"')
    if key == "prompt" and tokenizer is not None and (isinstance(value, str) or (chat and isinstance(value, list))):
        if isinstance(value, str):
            row = replace(row, prompt=value)
        else:
            messages = checked_messages(value, key, where)
            row = replace(row, prompt=last_user_text(messages), messages=messages)
        return row, _encode(row, tokenizer, chat, env)
    if key == "token_ids" and isinstance(value, list) and all(type(i) is int for i in value):
        with errors_at(where):
            return row, tuple(value if tokenizer is None else tokenizer.checked(value))
    allowed = '"prompt" must be a string (with --chat also a list of messages), "token_ids" a list of integers'
    raise DataError(f"{where}: {allowed}")

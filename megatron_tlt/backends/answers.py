"""The files of `megatron-tlt generate`: JSONL prompts in, JSONL answers and a JSON report out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import DataError
from megatron_tlt.types import Prompt

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.interfaces import Tokenizer
    from megatron_tlt.types import EngineStats, Sample


def read_prompts(path: Path, tokenizer: Tokenizer | None, chat: bool) -> list[Prompt]:
    """The prompts of a JSONL file; `prompt_id` counts them from 0 (empty lines are skipped).

    Raises DataError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text, token_ids = _parse(line, where, tokenizer, chat)
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens")
        prompts.append(Prompt(len(prompts), where, token_ids, text))
    if not prompts:
        raise DataError(f"{path}: no prompts")
    return prompts


def answer_lines(samples: Sequence[Sample], with_logprobs: bool) -> Iterator[str]:
    """One JSON object a sample."""
    for sample in samples:
        record: dict[str, Any] = {
            "prompt_index": sample.prompt_id,
            "sample_index": sample.sample_index,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
        }
        if with_logprobs:
            record["logprobs"] = sample.logprobs
        yield json.dumps(record, ensure_ascii=False)


def stats_report(stats: EngineStats, backend: EmbeddedBackend) -> str:
    """`EngineStats` with rates, phase timings and what computed. Resets the backend's phase timings."""
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
        "phase_seconds": backend.take_phase_seconds(),
        "decoder": backend.engine.runner.decoder.kind,
        "kv_cache_blocks": backend.engine.blocks.num_blocks,
        "graphs": backend.engine.graph_report(),
    }
    return json.dumps(report, indent=1)


def _parse(line: str, where: str, tokenizer: Tokenizer | None, chat: bool) -> tuple[str, tuple[int, ...]]:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as e:
        raise DataError(f"{where}: not JSON: {e}") from e
    keys = {"prompt", "token_ids"} & record.keys() if isinstance(record, dict) else set()
    if len(keys) != 1:
        raise DataError(
            f'{where}: an object with either "prompt" or "token_ids" is needed, got {line.strip()[:80]}'
        )
    key = keys.pop()
    value = record[key]
    if key == "prompt" and isinstance(value, str):
        if tokenizer is None:
            raise DataError(f'{where}: "prompt" needs a tokenizer and the model has none; give "token_ids"')
        return value, tuple(tokenizer.encode_chat(value) if chat else tokenizer.encode(value))
    if key == "token_ids" and isinstance(value, list) and all(type(i) is int for i in value):
        return "", tuple(value)
    raise DataError(f'{where}: "prompt" must be a string, "token_ids" a list of integers')

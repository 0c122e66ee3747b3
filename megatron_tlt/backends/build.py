"""Building a rollout backend: for training, and for `megatron-tlt generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from megatron_tlt.backends.answers import answer_lines, read_prompts, stats_report
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.speculation import check_speculation
from megatron_tlt.drafter.checkpoint import load_drafter
from megatron_tlt.errors import ConfigError, ConfigProblem, DataError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.factory import build_decoder, build_eagle
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.models.native.build import find_compiler
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.observe.jsonl import write_atomically
from megatron_tlt.rollout.engine import Engine, GraphBudget
from megatron_tlt.rollout.kv_cache import choose_num_blocks
from megatron_tlt.rollout.paged_hidden_states import page_bytes
from megatron_tlt.rollout.scheduler import SchedulerLimits
from megatron_tlt.rollout.spec.build import Drafting
from megatron_tlt.rollout.spec.history import AnswerHistory

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.interfaces import ProgressCallback, Tokenizer
    from megatron_tlt.models.base import Decoder
    from megatron_tlt.models.eagle.base import EagleDecoder
    from megatron_tlt.rollout.sampler import NativeSample
    from megatron_tlt.types import EngineStats, Prompt, SamplingParams


class GenerateOptions(TypedDict, total=False):
    """How answers are made and written; the sampling itself is `SamplingParams`."""

    n: int  # answers to each prompt, default 1
    chat: bool  # wrap prompts in the tokenizer's chat template
    logprobs: bool  # write log-probabilities
    rollout: RolloutSection  # the engine; its sampling fields are not read


def build_backend(
    rollout: RolloutSection,
    model: ModelSection,
    sync: SyncSection | None = None,
    *,
    device: torch.device | str = "cpu",
    tokenizer: Tokenizer | None = None,
    tp: TensorParallel | None = None,
    local_ranks: int = 1,
    load_weights: bool = False,
    count_near_ties: bool = False,
    drafter: Mapping[str, Tensor] | None = None,
    keep_features: bool = False,
) -> EmbeddedBackend:
    """The rollout engine of this rank, without weights unless `load_weights` (then at policy version 0).

    `drafter`: full tensors of a trained drafter, instead of those in `rollout.speculation.drafter_path`.
    All ranks of the tensor-parallel group `tp` (of `rollout.tp` ranks) call this together; `local_ranks` ranks
    share this machine's memory. `sync.verify` makes it keep checksums. `keep_features`: `Engine.features` will be set,
    so the cache leaves room for hidden states. Raises ConfigError, CheckpointError or BackendError.
    """
    device = torch.device(device)
    config = ModelConfig.from_hf(model.path)
    _check(rollout, model, config, tp, drafter is not None)
    decoder = build_decoder(
        config, device, DTYPES[rollout.dtype], rollout.kernels, rollout.threads, tp, rollout.numerics
    )
    if load_weights:
        decoder.load_weights(iter_weights(model.path, config))
    history = _history(rollout)
    eagle = _eagle(rollout, decoder, config, tp, drafter)
    num_blocks = choose_num_blocks(
        _block_bytes(rollout.block_size, decoder, eagle, keep_features),
        block_size=rollout.block_size,
        max_running=rollout.max_running_requests,
        max_context=model.max_context,
        budget_mib=rollout.kv_cache_mib,
        device=device,
        local_ranks=local_ranks,
    )
    if tp is not None and tp.size > 1:
        # Ranks see different amounts of free memory, and their schedulers must decide alike.
        num_blocks = int(tp.all_gather(torch.tensor([num_blocks], device=device)).min())
    engine = Engine(
        decoder,
        SchedulerLimits(
            rollout.max_running_requests, rollout.max_batched_tokens, model.max_context, config.vocab_size
        ),
        num_blocks,
        rollout.block_size,
        device=device,
        tokenizer=tokenizer,
        eos_token_ids=sorted({*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}),
        tp=tp,
        native_sample=_native_sample(decoder, rollout.threads),
        count_near_ties=count_near_ties,
        drafting=Drafting(rollout.speculation, eagle, history),
        graphs=_graphs(rollout, decoder),
    )
    return EmbeddedBackend(
        engine,
        config.parameter_shapes(),
        ignorable=("lm_head.weight",) if config.tie_word_embeddings else (),
        keep_checksums=sync is not None and sync.verify,
        has_weights=load_weights,
        history=history,
        longest_first=rollout.order == "longest_first",
        release_cache=rollout.release_cache,
    )


def generate_problems(model_dir: Path, in_jsonl: Path) -> list[ConfigProblem]:
    """What of `megatron-tlt generate`'s input is not there."""
    problems = []
    if not (model_dir / "config.json").is_file():
        allowed = "must be a Hugging Face directory with a config.json"
        problems.append(ConfigProblem("--model", str(model_dir), allowed))
    if not in_jsonl.exists() or in_jsonl.is_dir():  # a pipe will do
        problems.append(ConfigProblem("--prompts", str(in_jsonl), "no such file"))
    return problems


def generate_file(
    model_dir: str | Path,
    in_jsonl: str | Path,
    out_jsonl: str | Path,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    stats_path: str | Path | None = None,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[GenerateOptions],
) -> EngineStats:
    """Answers every line of `in_jsonl`, `n` times each, and writes `out_jsonl` in one piece at the end.

    Input lines: {"prompt": text} or {"token_ids": [ids]}. Output lines, by prompt and sample: prompt_index,
    sample_index, text, token_ids, finish_reason and, if asked, logprobs. The prompt's index is its id in the
    sampling key. All ranks of a tensor-parallel group call this; its rank 0 writes. Raises DataError naming
    file and line, ConfigError, CheckpointError, BackendError.
    """
    prompts = read_prompts(Path(in_jsonl), tokenizer, options.get("chat", False))
    rollout = options.get("rollout", RolloutSection()).model_copy(
        update={"tp": tp.size if tp is not None else 1}
    )
    model = ModelSection(path=str(model_dir), max_context=_context(prompts, params, model_dir))
    backend = build_backend(
        rollout, model, device=device, tokenizer=tokenizer, tp=tp, local_ranks=rollout.tp, load_weights=True
    )
    started = time.perf_counter()
    samples = backend.generate(prompts, params, options.get("n", 1), on_progress)
    stats = replace(backend.take_stats(), seconds=time.perf_counter() - started)
    if tp is None or tp.rank == 0:
        write_atomically(Path(out_jsonl), answer_lines(samples, options.get("logprobs", False)))
        if stats_path is not None:
            write_atomically(Path(stats_path), [stats_report(stats, backend)])
    backend.close()
    return stats


def _context(prompts: Sequence[Prompt], params: SamplingParams, model_dir: str | Path) -> int:
    """Tokens of the longest prompt and its answer. Raises DataError, ConfigError if the model has fewer positions."""
    limit = ModelConfig.from_hf(model_dir).max_position_embeddings
    longest = max(prompts, key=lambda p: len(p.token_ids))
    count = len(longest.token_ids)
    room = limit - count
    if room < 1:
        raise DataError(f"{longest.dataset_id}: {count} tokens, but the model has {limit} positions")
    if params.max_tokens > room:
        allowed = (
            f"at most {room}: the longest prompt and its answer must fit in the model's {limit} positions"
        )
        raise ConfigError.of("max_tokens", params.max_tokens, allowed)
    return count + params.max_tokens


def _graphs(rollout: RolloutSection, decoder: Decoder) -> GraphBudget | None:
    """Captured graphs where there is a device for them."""
    is_plain = rollout.tp == 1 and rollout.numerics == "default"
    if not (rollout.cuda_graphs and is_plain and decoder.device.type == "cuda"):
        return None
    assert isinstance(decoder, TorchDecoder)
    mib = rollout.graph_memory_mib
    return GraphBudget(decoder, None if mib is None else mib << 20)


def _history(rollout: RolloutSection) -> AnswerHistory | None:
    """Earlier answers, where somebody reads them: the suffix drafter, or the order of prompts."""
    section = rollout.speculation.suffix
    is_read = rollout.speculation.uses_suffix and section.history_epochs > 0
    if not is_read and rollout.order == "arrival":
        return None
    answers = section.history_answers if is_read else 0  # the order of prompts needs lengths only
    return AnswerHistory(max(1, section.history_epochs), answers, section.history_mib)


def _eagle(
    rollout: RolloutSection,
    decoder: Decoder,
    config: ModelConfig,
    tp: TensorParallel | None,
    weights: Mapping[str, Tensor] | None,
) -> EagleDecoder | None:
    """The trained drafter around the policy's decoder, its weights loaded."""
    section = rollout.speculation
    if not section.uses_eagle:
        return None
    if weights is None:
        assert section.drafter_path is not None  # `_check`
        weights = load_drafter(section.drafter_path, config).weights
    eagle = build_eagle(decoder, rollout.threads, tp)
    eagle.load_weights(weights.items())
    return eagle


def _block_bytes(size: int, decoder: Decoder, eagle: EagleDecoder | None, keep_features: bool) -> int:
    """Memory of one block: the policy's cache, the drafter's, and the hidden states that it reads or that are kept."""
    total = decoder.kv_bytes_per_block(size)
    if eagle is not None:
        total += eagle.kv_bytes_per_block(size)
    if eagle is not None or keep_features:
        total += page_bytes(size, decoder.config.hidden_size, decoder.dtype)
    return total


def _native_sample(decoder: Decoder, threads: int) -> NativeSample | None:
    """The C sampler, where the decoder is the native one (its library is built already)."""
    if decoder.kind != "native":
        return None
    from megatron_tlt.models.native.decoder import keyed_sample

    return partial(keyed_sample, threads=threads)


def _check(
    rollout: RolloutSection,
    model: ModelSection,
    config: ModelConfig,
    tp: TensorParallel | None,
    has_drafter: bool,
) -> None:
    """Everything that sizes an engine wrongly, at once."""
    section = rollout.speculation
    problems = list(check_speculation(section, has_drafter))
    if section.uses_suffix and find_compiler() is None:
        allowed = "needs a C compiler: no cc, gcc or clang on PATH (install gcc, or choose none or eagle)"
        problems.append(ConfigProblem("rollout.speculation.drafter", section.drafter, allowed))
    if model.max_context > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings}, the positions of the model in {model.path}"
        problems.append(ConfigProblem("model.max_context", model.max_context, allowed))
    size = tp.size if tp is not None else 1
    if size != rollout.tp:
        problems.append(ConfigProblem("rollout.tp", rollout.tp, f"the engine's group has {size} ranks"))
    if problems:
        raise ConfigError(problems)

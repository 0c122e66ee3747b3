"""`megatron-tlt generate`: responses to the prompts of a JSONL file."""

from __future__ import annotations

import json
import logging
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import cut_warning
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.checks.chat_template import check_template_kwargs
from megatron_tlt.config.checks.commands import check_generation
from megatron_tlt.config.checks.files import output_file_problems, same_file_problems
from megatron_tlt.data.prompt_queue import PromptQueue
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem, DataError
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.types import GenerateCall, SamplingParams

_KWARGS = "--chat-template-kwargs"
RESPONSES, STATS = rb'\{"prompt_index": \d+, "sample_index": ', rb'\{\n "steps": \d+,\n "prefill_steps": '
"""How the files that are written begin."""
_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import TurnSource
    from megatron_tlt.observe.jsonl import JsonRow
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.trainer.environments import Environments
    from megatron_tlt.types import EngineStats, Prompt, Sample


def add_generate(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "generate responses to the prompts of a JSONL file"
    command = commands.add_parser("generate", help=text, description=text)
    add = command.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory, or OWNER/NAME on the hub")
    add("--prompts", type=Path, required=True, help='JSONL of {"prompt"} or {"token_ids"}; for --env also {"answer"}')
    add("--out", type=Path, required=True, help="JSONL to write")
    add("--n", type=int, default=1, help="responses to each prompt (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens; 0: off (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="keep this share of the probability (default: %(default)s)")
    add("--min-p", type=float, default=0.0, help="least probability, as a share of the largest (default: %(default)s)")
    add("--max-tokens", type=int, default=512, help="longest response (default: %(default)s)")
    add("--stop", action="append", default=[], help="string that ends a response (repeatable)")
    add("--ignore-eos", action="store_true", help="go on behind the end token")
    add("--seed", type=int, default=0, help="of the sampling noise (default: %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the engine (default: %(default)s)")
    add("--kernels", choices=("auto", "native", "torch"), default="auto", help="decoder (default: %(default)s)")
    add("--chat", action="store_true", help="use the tokenizer's chat template")
    add("--chat-template-kwargs", type=_mapping, default={}, metavar="JSON",
        help="variables of the chat template, e.g. '{\"enable_thinking\": false}'")  # fmt: skip
    about_date = "YYYY-MM-DD that a chat template shows as today (default: today)"
    add("--chat-template-date", type=_date, metavar="DATE", help=about_date)
    add("--env", metavar="KIND|PATH:CLASS", help="environment for several turns, e.g. calculator or my_env.py:MyEnv")
    add("--logprobs", action="store_true", help="write the log-probability of every token")
    add("--stats", type=Path, help="JSON of counters and speeds to write")
    add("--overwrite", action="store_true", help="replace --out and --stats where they exist")
    about = "settings of engine and environment, e.g. rollout.speculation.drafter=suffix rollout.numerics=invariant"
    add("overrides", nargs="*", metavar="rollout.a.b=v, env.a=v", help=about)
    command.set_defaults(run=_generate)


def _mapping(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError):
        raise ArgumentTypeError(f"must be a JSON object, got {text}") from None


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"must be YYYY-MM-DD, got {text}") from None


def _generate(args: argparse.Namespace) -> int:
    from megatron_tlt.config.load import load_engine
    from megatron_tlt.config.run import DistributedSection
    from megatron_tlt.envs.build import environment_problems

    problems = argument_problems(args)
    options = [f"rollout.{name}={getattr(args, name)}" for name in ("dtype", "kernels")]
    try:
        engine, env = load_engine([*options, *args.overrides], args.env)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if env is not None:
        problems += environment_problems(env)
    if problems:
        raise ConfigError(problems)
    return run_on_every_rank(DistributedSection(), cpu_threads(), lambda world: _generate_on(args, engine, env, world))


def _sampling(args: argparse.Namespace) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos", "seed")
    return SamplingParams(**{name: getattr(args, name) for name in names}, stop=tuple(args.stop))


def argument_problems(args: argparse.Namespace) -> list[ConfigProblem]:
    """Arguments that argparse cannot refuse, and files that could not be written. Ranks look for input files."""
    return [
        *check_generation(_sampling(args), args.n, args.env is not None),
        *check_template_kwargs(_KWARGS, args.chat_template_kwargs, None if args.chat else "--chat"),
        *output_file_problems("--out", args.out, RESPONSES, [args.prompts], args.overwrite),
        *output_file_problems("--stats", args.stats, STATS, [args.prompts], args.overwrite),
        *same_file_problems("--stats", args.stats, "--out", args.out),
    ]


def _generate_on(args: argparse.Namespace, engine: RolloutSection, env: EnvSection | None, world: World) -> None:
    """One rank's part: several ranks are one tensor-parallel engine. Collective."""
    from megatron_tlt.data.hub import fetch_argument
    from megatron_tlt.data.prompts import file_prompts
    from megatron_tlt.data.tokenizer import end_tokens
    from megatron_tlt.trainer.environments import Environments, before_a_run, open_turns, prompts_of

    world.enter("generate")
    args.model = fetch_argument("--model", args.model, world)
    engine = _with_drafter_here(engine, world)
    tokenizer = _checked_tokenizer(args, engine, env, world)
    environments, params = None, _sampling(args)
    if env is not None:
        ends = end_tokens(args.model, tokenizer, args.stop)
        environments = Environments(env, tokenizer, world, chat=args.chat, ends=ends, stop=args.stop, tp=world.size)
        params = replace(params, max_turn_tokens=env.max_turn_tokens or 0)
    with ExitStack() as at_end:
        if environments is not None:
            at_end.callback(environments.close)
        with before_a_run(env):
            try:
                prompts = file_prompts(args.prompts, tokenizer, args.chat, prompts_of(environments), args.seed)
            except DataError as error:
                raise ConfigError.of("--prompts", str(args.prompts), str(error)) from error
        for warning in _prompt_warnings(args, prompts, tokenizer) if world.is_main else []:
            _log.warning(warning)
        turns = at_end.enter_context(open_turns(environments))
        stats = generate_file(
            args.model,
            prompts,
            args.out,
            params,
            tokenizer,
            stats_path=args.stats,
            world=world,
            n=args.n,
            rollout=engine,
            env=env,
            turns=turns,
            more_of=partial(_more_of, args.logprobs, environments),
        )
    if world.is_main:
        total, made = len(prompts) * args.n, stats.finished_requests
        now = ", " if made == total else f"; now {made} of them, "
        written = f"{total} responses{now}{stats.generated_tokens} tokens in {stats.seconds:.1f} s"
        print(f"wrote {args.out}: {written}", flush=True)


def _prompt_warnings(args: argparse.Namespace, prompts: Sequence[Prompt], tokenizer: HFTokenizer) -> list[str]:
    """Of plain texts without the chat template; with it, of rendered ones and of tools that it does not show."""
    from megatron_tlt.data.fields import TOOLS, checked_tools
    from megatron_tlt.trainer.chat_checks import plain_prompt_warning, row_warnings

    if not args.chat:
        return [*filter(None, [plain_prompt_warning(tokenizer, prompts)])]
    remedy = "without --chat texts stay as they are"
    # Of chat messages `text` is the last one, and all of them are in `metadata` under their column's name.
    texts = ((prompt.dataset_id, prompt.metadata.get("prompt", prompt.text)) for prompt in prompts)
    has_tools = any(checked_tools(prompt.metadata.get(TOOLS), prompt.dataset_id) for prompt in prompts)
    return row_warnings(tokenizer, f"--prompts {args.prompts}", remedy, texts, has_tools)


def _with_drafter_here(engine: RolloutSection, world: World) -> RolloutSection:
    """The engine with the directory of a drafter that has a name on the hub. Collective."""
    from megatron_tlt.data.hub import fetch_argument

    section = engine.speculation
    if section.trained is None or section.drafter_path is None:
        return engine
    here = fetch_argument("rollout.speculation.drafter_path", Path(section.drafter_path), world, "drafter")
    return engine.model_copy(update={"speculation": section.model_copy(update={"drafter_path": str(here)})})


def _checked_tokenizer(
    args: argparse.Namespace, engine: RolloutSection, env: EnvSection | None, world: World
) -> HFTokenizer:
    """The model's tokenizer; rank 0 logs warnings of the input. Collective. Raises ConfigError with every problem."""
    from megatron_tlt.config.checks.speculation import unread_settings
    from megatron_tlt.data.chat_template import TemplateSettings
    from megatron_tlt.data.tokenizer import HFTokenizer, end_tokens
    from megatron_tlt.drafters.checkpoint import drafter_warnings
    from megatron_tlt.envs.build import environment_warning
    from megatron_tlt.models.hf.config import ModelConfig
    from megatron_tlt.models.hf.files import model_warnings
    from megatron_tlt.trainer.chat_checks import generation_chat_problems, unread_warnings
    from megatron_tlt.trainer.preflight import generation_problems
    from megatron_tlt.trainer.token_checks import embedding_problems, warnings_of

    problems = generation_problems(args.model, args.prompts, engine.speculation) if world.is_main else []
    if problems := world.broadcast_object(problems):
        raise ConfigError(problems)
    model = ModelConfig.from_hf(args.model)
    day = world.broadcast_object(args.chat_template_date or date.today())  # one on all ranks
    try:
        tokenizer = HFTokenizer(args.model, model.vocab_size, TemplateSettings(args.chat_template_kwargs, day))
    except CheckpointError as error:
        raise ConfigError.of("--model", str(args.model), str(error)) from error
    if problems := [
        *embedding_problems("--model", tokenizer, model.vocab_size, chat=args.chat),
        *generation_chat_problems(tokenizer, args.chat, args.chat_template_kwargs, args.stop),
    ]:
        raise ConfigError(problems)
    if world.is_main:
        ends = end_tokens(args.model, tokenizer, args.stop)
        warnings = [
            *unread_warnings(tokenizer, _KWARGS, args.chat_template_kwargs),
            *warnings_of(tokenizer, model.vocab_size, ends, args.chat and not args.ignore_eos, args.stop, "--stop"),
            *model_warnings(args.model),
            *drafter_warnings(engine.speculation, model),
            *unread_settings(engine.speculation),
            None if env is None else environment_warning(env),
        ]
        for warning in filter(None, warnings):
            _log.warning(warning)
    return tokenizer


def _more_of(logprobs: bool, environments: Environments | None, sample: Sample) -> JsonRow:
    """Fields of an output line that not every command asks for."""
    row: JsonRow = {"logprobs": sample.logprobs} if logprobs else {}
    if environments is not None:
        row |= {"given": sample.given, "turn_rewards": sample.turn_rewards, "failure": sample.failure}
        row["turns"] = environments.turn_rows(sample)
    return row


def generate_file(
    model_dir: Path,
    prompts: Sequence[Prompt],
    out_jsonl: Path,
    params: SamplingParams,
    tokenizer: HFTokenizer | None,
    *,
    n: int,
    stats_path: Path | None,
    rollout: RolloutSection,
    world: World,
    env: EnvSection | None,
    turns: TurnSource | None,
    more_of: Callable[[Sample], JsonRow],
) -> EngineStats:
    """Generates `n` responses to each of `prompts` and writes `out_jsonl` at the end, whole. Until then finished ones
    are in OUT.unfinished, from where the same call takes them (`cache_beside`). Returns counters of this call.

    Output lines, by prompt and sample: prompt_index, sample_index, text, token_ids, finish_reason and what `more_of`
    returns. The prompt's index is its id in the sampling key. `rollout`: the engine; its sampling fields are not read.
    `turns`: environments, those of `env`; text is then that of the last turn. Collective over `world`, whose ranks are
    one tensor-parallel engine. Raises DataError for a prompt that is too long, ConfigError, CheckpointError,
    BackendError.
    """
    from megatron_tlt.backends.build import build_backend
    from megatron_tlt.config.run import RolloutCacheSection
    from megatron_tlt.trainer.models import push_policy
    from megatron_tlt.trainer.response_cache import cache_beside, response_identity

    section = rollout.model_copy(update={"tp": world.size})
    options = _engine(section, model_dir, tokenizer, world, _context(prompts, params, model_dir))
    backend = build_backend(options)
    try:
        identity = response_identity(params, section, env, model_dir, tokenizer, options.device, world)
        cache = cache_beside(out_jsonl, RolloutCacheSection(), world, backend, identity)
        cache.begin_step(1, 0, push_policy(model_dir, backend, world, hashes=cache.keeps))
        started = time.perf_counter()
        queue = PromptQueue(prompts, 0, 1, len(prompts), ticket=lambda: 0)  # all are this one replica's own
        samples = _responses(cache, GenerateCall(queue, params, n, turns=turns), len(prompts) * n, world.rank)
        stats = replace(backend.take_stats(), seconds=time.perf_counter() - started)
        if world.is_main:
            _write_responses(out_jsonl, samples, more_of, params, env is not None)
            if stats_path is not None:
                write_atomically(stats_path, [stats_report(stats, backend)])
        cache.clear()
    finally:
        backend.close()
    return stats


def _responses(cache: RolloutCache, call: GenerateCall, total: int, rank: int) -> list[Sample]:
    """The `total` responses of the call, with those of earlier starts; rank 0 shows the progress. Collective."""
    from megatron_tlt.observe.progress import build_progress

    found = cache.find(call)
    with closing(build_progress("auto", 0, rank)) as progress:
        if cache.has_old_steps:
            progress.note(cache.reuse_line(len(found), total))
        return cache.generate(progress.watched(call, "generate: responses", total - len(found)), found)


def _engine(
    section: RolloutSection, model_dir: Path, tokenizer: HFTokenizer | None, world: World, longest: int
) -> EngineOptions:
    """The engine of all ranks, for requests of at most `longest` tokens. Collective."""
    from megatron_tlt.backends.options import EngineOptions
    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.trainer.models import tensor_parallel

    return EngineOptions(
        section,
        ModelSection(path=str(model_dir), max_context=longest),
        device=world.device,
        tokenizer=tokenizer,
        tp=tensor_parallel(world, world.size),
        local_ranks=section.tp,
        longest_request=longest,
    )


def _context(prompts: Sequence[Prompt], params: SamplingParams, model_dir: Path) -> int:
    """Tokens of the longest prompt and its response. Raises DataError, ConfigError if the model has fewer positions."""
    from megatron_tlt.models.hf.config import ModelConfig

    limit = ModelConfig.from_hf(model_dir).max_position_embeddings
    longest = max(prompts, key=lambda p: len(p.token_ids))
    count = len(longest.token_ids)
    room = limit - count
    if room < 1:
        raise DataError(f"{longest.dataset_id}: {count} tokens, but the model has {limit} positions")
    if params.max_tokens > room:
        prompt = f"the longest prompt, {longest.dataset_id}, has {count} tokens"
        allowed = f"at most {room}: {prompt}, and with its response it must fit in the model's {limit} positions"
        raise ConfigError.of("--max-tokens", params.max_tokens, allowed)
    return count + params.max_tokens


def _write_responses(
    path: Path, samples: Sequence[Sample], more_of: Callable[[Sample], JsonRow], params: SamplingParams, has_env: bool
) -> None:
    """Writes the output whole. Warns of cut responses and of trajectories that their environment did not answer."""
    from megatron_tlt.trainer.turn_metrics import unanswered

    write_atomically(path, map(partial(_line, more_of), samples))
    truncated = 0.0 if params.ignore_eos else sum(sample.is_truncated for sample in samples) / len(samples)
    cut = cut_warning(truncated, f"--max-tokens = {params.max_tokens}", has_env, "a larger one may let them end")
    for warning in filter(None, (unanswered(samples), cut)):
        _log.warning(warning)


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

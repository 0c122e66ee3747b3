"""`megatron-tlt eval`: accuracy of a model on a configuration's held-out prompts."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.cli.options import add_config, cut_warning, read_config
from megatron_tlt.cli.ranks import run_on_every_rank
from megatron_tlt.config.checks.commands import base_warning, check_base, check_held_out
from megatron_tlt.config.checks.files import output_file_problems
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.files import write_atomically
from megatron_tlt.observe.jsonl import to_json

if TYPE_CHECKING:
    import argparse

    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.trainer.evaluation import EvalResult
    from megatron_tlt.types import SamplingParams

RESULT = rb'\{\n  "step": \d+,\n  "num_prompts": '  # how the result begins


def add_eval(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "evaluate a model on a config's held-out prompts"
    command = commands.add_parser("eval", help=text, description=text)
    add_config(command)
    command.add_argument("--out", type=Path, help="also write the result as JSON")
    command.add_argument("--overwrite", action="store_true", help="replace --out where it exists")
    command.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> int:
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.hub import on_this_machine

    config = read_config(args, Config)
    if problems := output_file_problems("--out", args.out, RESULT, [args.config], args.overwrite):
        raise ConfigError(problems)

    def body(world: World) -> None:
        from megatron_tlt.trainer.preflight import without_training

        reads = without_training(config, reads_prompts=False)
        _eval_on(on_this_machine(config, world, as_named=True, reads=reads), world, args.out)

    return run_on_every_rank(config.distributed, cpu_threads(), body)


def _eval_on(config: Config, world: World, out: Path | None) -> None:
    """Evaluates the model in `model.path` on the held-out prompts. Collective."""
    from megatron_tlt.data.prompts import held_out_prompts
    from megatron_tlt.observe.progress import build_progress
    from megatron_tlt.trainer.chat_settings import with_date
    from megatron_tlt.trainer.environments import before_a_run, open_environments, prompts_of
    from megatron_tlt.trainer.evaluation import first_of_each
    from megatron_tlt.trainer.models import open_backend, push_policy, tensor_parallel
    from megatron_tlt.trainer.preflight import check_on, without_training
    from megatron_tlt.trainer.response_cache import cache_beside, response_identity
    from megatron_tlt.trainer.setup import build_evaluator, open_tokenizer, prompt_queues, reward_pool

    reads = without_training(config, reads_prompts=False)
    check_on(reads, world, [*check_held_out(config), *check_base(config)])
    config = with_date(config, world)
    tokenizer = open_tokenizer(config)
    environments = open_environments(config, tokenizer, world)
    with before_a_run(config.env):
        prompts = held_out_prompts(config.data, tokenizer, config.eval.num_prompts, prompts_of(environments))
    rewards = reward_pool(config, world)
    tp = tensor_parallel(world, config.rollout.tp)
    backend = open_backend(reads, world, tokenizer, tp)
    evaluator = build_evaluator(config, prompts, backend, rewards, prompt_queues(config, world, tp), environments)
    assert evaluator is not None, "data.eval is there"
    identity = response_identity(
        evaluator.params, config.rollout, config.env, config.model.path, tokenizer, world.device, world
    )
    cache = cache_beside(out, config.rollout_cache, world, backend, identity)
    world.enter("load")
    cache.begin_step(1, 0, push_policy(config.model.path, backend, world, config.sync, cache.keeps))
    world.enter("eval")
    if world.is_main:
        print(_what(config, len({*first_of_each(prompts).values()}), len(prompts)), file=sys.stderr, flush=True)
    # stdout holds the result, as JSON
    with closing(build_progress("auto", 0, world.rank, sys.stderr)) as progress:
        result = evaluator.run(0, progress=progress, cache=cache)
    rewards.close()
    if environments is not None:
        environments.close()
    backend.close()
    if world.is_main:
        _write_result(config, result, out)
    _end_cache(cache, result.failures, out, world.is_main)


def _write_result(config: Config, result: EvalResult, out: Path | None) -> None:
    """Prints the result as JSON and writes it to `out`. Raises OSError."""
    from megatron_tlt.trainer.metrics import threshold_warning

    row = {"reward/accuracy": result.pass_at["1"], "reward/mean": result.reward}
    unreached = threshold_warning(row) if config.rewards.is_of_unknown_scale else None
    for warning in filter(None, [unreached, _cut_warning(config, result.truncated)]):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    text = json.dumps(to_json(asdict(result)), indent=2, allow_nan=False)
    print(text, flush=True)
    if out is not None:
        write_atomically(out, [text])


def _end_cache(cache: RolloutCache, failures: int, out: Path | None, is_main: bool) -> None:
    """Removes the responses beside `out`, unless some were not judged: these can be judged again. Collective."""
    if not failures:
        cache.clear()
        return
    cache.close()
    kept = f"; {out}.{UNFINISHED} keeps the responses: the same command with --overwrite judges them again"
    text = f"warning: {failures} responses were not judged and count as wrong{kept if cache.keeps else ''}"
    if is_main:
        print(text, file=sys.stderr, flush=True)


def _params(config: Config) -> SamplingParams:
    from megatron_tlt.trainer.evaluation import eval_params
    from megatron_tlt.trainer.sampling import sampling_params

    return eval_params(config.eval, sampling_params(config))


def _sampling(config: Config) -> str:
    """What decides the accuracy beside prompts and rewards: number, length and sampling of the responses."""
    params = _params(config)
    shown: dict[str, float] = {"samples_per_prompt": config.eval.samples_per_prompt, "max_tokens": params.max_tokens}
    shown |= {"temperature": params.temperature, "top_p": params.top_p}
    shown |= {name: value for name in ("top_k", "min_p") if (value := getattr(params, name))}
    settings = ", ".join(f"eval.{name} = {value:g}" for name, value in shown.items())
    return f"{settings}, rollout.dtype = {config.rollout.dtype}"


def _cut_warning(config: Config, truncated: float) -> str | None:
    """A warning of accuracies that the limit of length may have decided; `truncated`: share of the responses."""
    limit = f"eval.max_tokens = {_params(config).max_tokens}"
    remedy = f"with a larger one, and model.max_context = {config.model.max_context}, the accuracy may be higher"
    return cut_warning(truncated, limit, config.env is not None, remedy)


def _what(config: Config, num_prompts: int, num_rows: int) -> str:
    """What is evaluated and how, a line each; `num_prompts`: different ones, of `num_rows`."""
    from megatron_tlt.actor.checkpoint_files import complete_steps
    from megatron_tlt.rewards.base import correct_line

    source = config.data.eval
    assert source is not None
    rows = source.path or ", ".join(dict.fromkeys(task.name for task in source.tasks)) or source.kind
    functions = ", ".join(function.path or function.name for function in config.rewards.functions) or "none"
    prompts = f"{num_prompts} of data.eval ({rows})" + (f" in {num_rows} rows" if num_rows > num_prompts else "")
    lines = [f"Evaluating model.path = {config.model.path}", f"Prompts: {prompts}", f"Responses: {_sampling(config)}"]
    lines += [f"Rewards: {functions}", *filter(None, [correct_line(config.rewards)])]
    if (unread := base_warning(config)) is not None:
        lines.append(f"warning: {unread}")
    if complete_steps(Path(run := config.train.run_dir) / "checkpoints"):
        lines.append(f"Checkpoints of {run} are not evaluated: `megatron-tlt export` writes one as a model")
    return "\n".join(lines)

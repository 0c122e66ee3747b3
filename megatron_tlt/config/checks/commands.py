"""Rules of single commands: their needs of a configuration, and the arguments of `generate`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.config.checks.texts import check_texts
from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.types import SamplingParams


def check_num_ranks(ranks: int | None) -> Iterator[ConfigProblem]:
    """`check --ranks`; None: not given."""
    if ranks is not None and ranks < 1:
        yield ConfigProblem("--ranks", ranks, "must be >= 1")


def check_held_out(config: Config) -> Iterator[ConfigProblem]:
    """`eval` and `drafter eval` measure on held-out prompts."""
    if config.data.eval is None:
        yield ConfigProblem("data.eval", None, "is required: this command measures on held-out prompts")


def check_base(config: Config) -> Iterator[ConfigProblem]:
    """`eval`, `drafter train` and `drafter eval` read the weights of `model.path` alone."""
    lora = config.actor.lora
    if lora is not None and lora.adapter_path is not None:
        allowed = "must be null here: the model is measured without it. Name a merged export in model.path"
        yield ConfigProblem("actor.lora.adapter_path", lora.adapter_path, allowed)


def base_warning(config: Config) -> str | None:
    """The warning of weights that the commands of `check_base` do not read; None without any."""
    if config.model.megatron_path is None:
        return None
    return (
        f"model.megatron_path = {config.model.megatron_path} is not read here: the weights are those of model.path = "
        f"{config.model.path}. `megatron-tlt export` writes a run's trained policy as a model"
    )


def check_drafter_engine(config: Config) -> Iterator[ConfigProblem]:
    """`drafter train` and `drafter eval` read the policy's hidden states."""
    if not CAPABILITIES[config.rollout.backend].in_process:
        allowed = "must be 'embedded' here: a drafter learns from the policy's hidden states"
        yield ConfigProblem("rollout.backend", config.rollout.backend, allowed)
    if config.env is not None:
        allowed = "must be null here: before a run a drafter learns from single responses"
        yield ConfigProblem("env", config.env.path or config.env.kind, allowed)


def check_generation(params: SamplingParams, num_samples: int, has_env: bool) -> Iterator[ConfigProblem]:
    """Arguments of `generate`: `num_samples` responses to each prompt."""
    if num_samples > 1 and params.temperature == 0 and not has_env:
        allowed = "must be 1 with --temperature 0: greedy responses to one prompt are all the same"
        yield ConfigProblem("--n", num_samples, allowed)
    for name, count in (("n", num_samples), ("max-tokens", params.max_tokens)):
        if count < 1:
            yield ConfigProblem(f"--{name}", count, "must be >= 1")
    for name, value, allowed in out_of_range(params):
        yield ConfigProblem(f"--{name.replace('_', '-')}", value, f"must be {allowed}")
    yield from check_texts(params.stop, "--stop")
    if "" in params.stop:
        yield ConfigProblem("--stop", "", "must not be empty: it would end every response at once")


def out_of_range(params: SamplingParams) -> Iterator[tuple[str, float, str]]:
    """(field, value, allowed values) of an impossible temperature or mask."""
    if not 0 <= params.temperature < float("inf"):
        yield "temperature", params.temperature, ">= 0, and finite"
    if not params.top_k >= 0:
        yield "top_k", params.top_k, ">= 0 (0: off)"
    if not 0 < params.top_p <= 1:
        yield "top_p", params.top_p, "in (0, 1]"
    if not 0 <= params.min_p <= 1:
        yield "min_p", params.min_p, "in [0, 1]"

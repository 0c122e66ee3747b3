"""The simulation of a run's own configuration: its machines, its engine, usual lengths. Torch-free.

The memory plan decides what is simulated: a configuration that does not fit is refused, and the KV cache has the size
that a run would allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_tlt.config.checks.pre_rollouts import why_no_pre_rollouts, why_pre_rollouts_cannot_run
from megatron_tlt.config.checks.run import find_problems
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.memory import KV, estimate_memory
from megatron_tlt.config.planning.parameters import MIB, kv_bytes_per_token
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.root import Config
from megatron_tlt.config.sim import SimConfig
from megatron_tlt.errors import ConfigError, ConfigProblem
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.sim.cost_model import kv_bytes
from megatron_tlt.sim.modes import pre_rolls

# Assumed: the median response takes this share of `rollout.max_tokens`, with the default spread of lengths.
_MEDIAN_SHARE = 1 / 8
_PROMPT_TOKENS = 256  # assumed, where `data.max_prompt_tokens` is not less
_GPUS = ((40.0, "rtx4090"), (80.0, "h100"), (math.inf, "h200"))  # assumed, by the most GiB of memory
STALE_RATE = 0.5  # assumed: of a drafter that starts from the policy's second layer
ADAPTED_RATE = 0.82  # assumed: of that drafter once it is adapted
_STEPS, _STEPS_AHEAD = 2, 4  # simulated; more where a mode pre-rolls, for the first has nothing to verify


def usual_modes(runs: Sequence[Config], modes: Sequence[str]) -> list[str]:
    """Those of `modes` that the run's engine and drafter have, frozen in place of tlt where it does not train the
    drafter, and tlt+pre if that is what the run does on one of its numbers of nodes; `runs`: it on each of them.
    """
    trains = runs[0].idle.train_drafter
    is_own = trains and any(map(_does_pre_roll, runs))
    if runs[0].rollout.speculation.trained is None:
        modes = [mode for mode in modes if mode in ("off", "suffix", "pre")]
    elif not trains:
        modes = ["frozen" if mode == "tlt" else mode for mode in modes]
    return [*(mode for mode in modes if _why_not(runs[0], mode) is None), *["tlt+pre"] * is_own]


def simulation_of(config: Config, modes: Sequence[str] = ()) -> tuple[SimConfig, list[str]]:
    """The simulation of a run on the machines of its `cluster` section, and what is assumed of the run for it, a
    sentence each. `modes`: those that are to be compared. `algorithm.teacher_shape` is the teacher's, where it is
    known. Raises ConfigError if the run cannot run or fit, or its engine lacks a mode.
    """
    ranks, shape = config.cluster.num_ranks, config.model.architecture
    if shape is None:
        allowed = f"is required to simulate a run whose model.path ({config.model.path}) is not here: the model's shape"
        raise ConfigError.of("model.architecture", None, allowed)
    memory = config.cluster.memory_gib
    if memory is None:
        raise ConfigError.of("cluster.memory_gib", None, "is required to simulate a run: it decides which GPU that is")
    refused = {mode: reason for mode in modes if (reason := _why_not(config, mode)) is not None}
    problems = [ConfigProblem("--compare", mode, f"cannot run with {reason}") for mode, reason in refused.items()]
    at = f"(cluster.nodes = {config.cluster.nodes})"
    problems += [replace(of, allowed=f"{of.allowed} {at}") for of in find_problems(config, None, ranks, "cuda")]
    if problems:
        raise ConfigError(problems)
    steps = _STEPS_AHEAD if any(map(pre_rolls, modes)) else _STEPS
    tree: dict[str, Any] = {
        "name": Path(config.train.run_dir).name,
        "model": shape,
        "cluster": {
            "nodes": config.cluster.nodes,
            "gpus_per_node": config.cluster.ranks_per_node,
            "gpu": next(gpu for most, gpu in _GPUS if memory <= most),
        },
        "workload": {
            "steps": steps,
            "prompts_per_step": config.train.prompts_per_step,
            "prompt_tokens": min(_PROMPT_TOKENS, config.data.max_prompt_tokens),
            "lengths": {"median": max(1.0, config.rollout.max_tokens * _MEDIAN_SHARE)},
        },
        "rollout": _rollout(config, shape),
        "idle": config.idle.model_copy(update={"pre_rollout": _does_pre_roll(config)}),
        "drafters": {"trained": {"rates": (ADAPTED_RATE,), "stale_rates": (STALE_RATE,)}},
        "training": _training(config),
    }
    return SimConfig.model_validate(tree), [_steps_text(steps), *_assumed(config)]


def _does_pre_roll(config: Config) -> bool:
    return why_no_pre_rollouts(config, config.cluster.num_ranks) is None


def _why_not(config: Config, mode: str) -> str | None:
    """Why the run's engine does not have the mode; None: it does."""
    backend = config.rollout.backend
    drafters = CAPABILITIES[backend].drafters
    if mode == "suffix" and drafters is not None and mode not in drafters:
        return f"rollout.backend: {backend}, which has no suffix drafts"
    return why_pre_rollouts_cannot_run(config) if pre_rolls(mode) else None


def _steps_text(steps: int) -> str:
    first = ", of which the first has no pre-rolled responses" if steps == _STEPS_AHEAD else ""
    return f"the mean is of {steps} steps{first}"


def _rollout(config: Config, shape: ArchitectureConfig) -> RolloutSection:
    """The engine with the planned KV cache, and a drafter that is there."""
    cache = estimate_memory(config, shape, config.cluster.num_ranks, "cuda")[0].parts[KV]
    tokens = cache // kv_bytes_per_token(config, shape)
    # The simulator counts the policy's layers only; so many MiB of those hold as many tokens.
    cache_mib = max(1, tokens * kv_bytes(shape) // config.rollout.tp // MIB)
    speculation = config.rollout.speculation
    if speculation.trained and speculation.drafter_path is None:
        made = {
            "drafter_path": "made from the policy",
            "draft_vocab_size": speculation.draft_tokens(shape.vocab_size),
        }
        speculation = speculation.model_copy(update=made)
    update: dict[str, Any] = {"kv_cache_mib": cache_mib, "speculation": speculation}
    if not CAPABILITIES[config.rollout.backend].keyed_sampling:  # as a run: prompts are handed out before the rollout
        update["schedule"] = "static"
    return config.rollout.model_copy(update=update)


def _training(config: Config) -> dict[str, Any]:
    """The update, the passes before it, and the drafter's micro-step."""
    teacher = config.algorithm.teacher_shape if _scores_with_teacher(config) else None
    return {
        "recompute": config.actor.recompute == "full",
        "lora": config.actor.lora is not None,
        "logprob_passes": _logprob_passes(config) - (teacher is not None),
        "teacher": teacher,
        "micro_step_tokens": config.drafter.sizes("cuda").micro_step_tokens * config.rollout.tp,
        "draft_steps": config.drafter.online.draft_steps,
    }


def _scores_with_teacher(config: Config) -> bool:
    """Whether the frozen model that is scored beside the policy is a teacher."""
    return config.algorithm.teacher is not None and config.algorithm.kl_weight > 0


def _assumed(config: Config) -> Iterator[str]:
    """What the simulation leaves out of the run, or takes for what is not known of it."""
    most = config.data.max_prompt_tokens
    yield f"prompts have {min(_PROMPT_TOKENS, most)} tokens (data.max_prompt_tokens: {most:,})"
    if (backend := config.rollout.backend) != "embedded":
        yield f"steps cost and draft as the embedded engine's: rollout.backend = {backend!r} is not simulated"
    yield from _assumed_of_drafter(config)
    if config.algorithm.dynamic_sampling:
        yield "a step has one rollout: algorithm.dynamic_sampling drops no group and rolls out no more prompts"
    if config.env is not None and config.env.is_named:
        at, value = config.env.named_by
        yield f"responses have one turn: nothing is waited for or read of the environment ({at} = {value!r})"
    if _scores_with_teacher(config) and config.algorithm.teacher_shape is None:
        teacher = config.algorithm.teacher
        yield f"the teacher's pass costs one of the policy: algorithm.teacher = {teacher!r} is not on this machine"
    for name, dtype in (("rollout.dtype", config.rollout.dtype), ("actor.dtype", config.actor.dtype)):
        if dtype != "bf16":
            yield f"a forward costs what it does in bf16: {name} = {dtype}"


def _assumed_of_drafter(config: Config) -> Iterator[str]:
    speculation, shape = config.rollout.speculation, config.model.architecture
    if speculation.trained is None or shape is None:
        return
    yield (
        f"a token of the trained drafter is right with a chance of {STALE_RATE:g} at first, and with one of "
        f"{ADAPTED_RATE:g} once the drafter is adapted"
    )
    if (path := speculation.drafter_path) is not None and not Path(path).is_dir():
        costs = f"costs as a new one over {speculation.drafted_tokens(shape.vocab_size):,} tokens"
        yield f"the drafter {costs}: rollout.speculation.drafter_path = {path!r} is not on this machine"


def _logprob_passes(config: Config) -> int:
    """Passes of log-probs in a step: of the reference, of the policy beside it where their difference is a reward
    (`trainer/batch_assembly`), and before the first of several mini-batches.
    """
    rl = config.algorithm
    has_reference = rl.kl_weight > 0
    return has_reference + (has_reference and rl.kl_in == "reward") + (rl.mini_batches > 1)

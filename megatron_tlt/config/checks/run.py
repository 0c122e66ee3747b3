"""All cross-checks of a run, which need no weights, and the memory plan's.

Every check yields all its problems; nothing raises. Without the model's shape (None) those that need it are skipped.
"""

from __future__ import annotations

from megatron_tlt.config.checks.backend import check_backend
from megatron_tlt.config.checks.carry_over import check_carry_over
from megatron_tlt.config.checks.chat_template import check_chat_template
from megatron_tlt.config.checks.env import check_env
from megatron_tlt.config.checks.layout import (
    Device,
    check_architecture,
    check_attention,
    check_batch,
    check_experts,
    check_first_stage,
    check_grid,
    check_world,
    pp_problems,
    resolve_device,
    tp_problems,
)
from megatron_tlt.config.checks.learning import (
    check_algorithm,
    check_data,
    check_lora,
    check_optimizer,
    check_records,
    check_rewards,
)
from megatron_tlt.config.checks.memory import check_memory
from megatron_tlt.config.checks.pre_rollouts import check_pre_rollouts
from megatron_tlt.config.checks.rollout import check_context, check_positions, check_rollout
from megatron_tlt.config.checks.speculation import check_idle, check_speculation
from megatron_tlt.config.checks.teacher import check_teacher
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config, TrainingConfig
from megatron_tlt.errors import ConfigProblem, Problems


def find_problems(
    config: TrainingConfig,
    shape: ArchitectureConfig | None,
    num_ranks: int,
    device: Device | None = None,
    max_positions: int | None = None,
) -> list[ConfigProblem]:
    """Every reason why this configuration cannot run on `num_ranks` ranks, memory included."""
    problems = check_config(config, shape, num_ranks, device, max_positions)
    shape = shape if shape is not None else config.model.architecture
    if shape is not None and not any(check_grid(config, num_ranks)):
        problems += check_memory(config, shape, num_ranks, device)
    return problems


def check_config(
    config: TrainingConfig,
    shape: ArchitectureConfig | None,
    num_ranks: int,
    device: Device | None = None,
    max_positions: int | None = None,
) -> list[ConfigProblem]:
    """All problems of a run on `num_ranks` ranks; an empty list means it can run.

    `device`: of the ranks (None: `distributed.device`, unknown if that is auto); `max_positions` the
    longest context the model was made for, in tokens.
    """
    device = resolve_device(config, device)
    shape = shape if shape is not None else config.model.architecture
    problems = [
        *check_world(config, num_ranks, device),
        *tp_problems(shape, "actor.tp", config.actor.tp),
        *pp_problems(shape, "actor.pp", config.actor.pp),
        *check_attention(config, device),
        *check_experts(config, shape),
        *check_first_stage(config, shape),
        *check_lora(config, shape),
        *check_architecture(config, shape),
        *check_chat_template(config),
        *check_optimizer(config.optimizer, config.optimizer_steps),
        *check_stop(config),
    ]
    if config.rl is None:
        found = [*problems, *_check_replay(config), *check_records(config.records)]
        return [*found, *check_positions(config.model.max_context, max_positions)]
    return [*problems, *_check_rl(config.rl, shape, num_ranks, device, max_positions)]


def _check_rl(
    config: Config,
    shape: ArchitectureConfig | None,
    num_ranks: int,
    device: Device | None,
    max_positions: int | None,
) -> list[ConfigProblem]:
    """What fine-tuning does not have; see `check_config`."""
    found = [
        *check_rollout(config, shape, num_ranks, device),
        *check_speculation(config.rollout.speculation, has_drafter=config.idle.train_drafter),
        *check_idle(config, shape, num_ranks, device),
        *check_backend(config, shape, device),
        *check_context(config, max_positions),
        *check_data(config),
        *check_rewards(config),
        *check_env(config),
    ]
    if not config.trains:
        return found
    return [
        *found,
        *check_pre_rollouts(config),
        *check_batch(config, num_ranks),
        *check_algorithm(config),
        *check_teacher(config, shape),
        *check_carry_over(config),
        *check_watchdog(config),
    ]


def _check_replay(config: TrainingConfig) -> Problems:
    if config.actor.router_replay != "off":
        allowed = "must be 'off' in fine-tuning: nothing is rolled out, so no experts are recorded"
        yield ConfigProblem("actor.router_replay", config.actor.router_replay, allowed)


def check_stop(config: TrainingConfig) -> Problems:
    """A signal must leave time for a checkpoint."""
    stop = config.stop
    for name, grace in (("stop.warning_s", stop.warning_s), ("stop.term_s", stop.term_s)):
        if grace <= stop.save_s:
            yield ConfigProblem(name, grace, f"must be above stop.save_s ({stop.save_s:g})")


def check_watchdog(config: Config) -> Problems:
    """A rank that waits in a collective, after other work, shows no sign of life and is not the one that hangs."""
    hang, timeout = config.hang_s, config.distributed.timeout_s
    if 0 < hang < 2 * timeout:
        yield ConfigProblem("watchdog.hang_s", hang, f"must be 0 or >= 2 * distributed.timeout_s ({2 * timeout:g})")

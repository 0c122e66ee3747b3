"""Assembly of a run from its configuration: the only module that, with `models`, imports all of a run's parts.

Order matters: configuration errors are found before weights are loaded, and weight errors before steps are spent.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.algorithms.build import build_algorithm
from megatron_tlt.config.checks.pre_rollouts import why_no_eval_drafts, why_no_pre_rollouts
from megatron_tlt.config.dims import is_first_of_engine
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.prompt_queue import PromptQueues
from megatron_tlt.data.prompts import build_prompts, held_out_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.processors import engine_cpus
from megatron_tlt.drafters.training.run_drafter import RunDrafter
from megatron_tlt.idle.window import IdleWindow
from megatron_tlt.interfaces import CAPABILITIES, RolloutBackend
from megatron_tlt.resilience.heartbeat import start_watchdog
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.resilience.rollout_cache import RolloutCache
from megatron_tlt.resilience.run_lock import RunLock, lock_run_dir
from megatron_tlt.resilience.shutdown import GracefulShutdown
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer import device_memory
from megatron_tlt.trainer.batch_assembly import BatchAssembler
from megatron_tlt.trainer.carry_over import CarriedGroups
from megatron_tlt.trainer.chat_settings import with_date
from megatron_tlt.trainer.environments import Environments, before_a_run, open_environments, prompts_of
from megatron_tlt.trainer.evaluation import Evaluator
from megatron_tlt.trainer.loop import RLTrainer
from megatron_tlt.trainer.metrics import RunMetrics
from megatron_tlt.trainer.models import build_models, tensor_parallel
from megatron_tlt.trainer.pre_rollouts import PreRoller
from megatron_tlt.trainer.preflight import check_on, place_problems
from megatron_tlt.trainer.recovery import Recovery, TrainState
from megatron_tlt.trainer.response_cache import response_identity
from megatron_tlt.trainer.sampling import GroupSampler, sampling_params, step_params
from megatron_tlt.trainer.teacher import with_teacher_shape
from megatron_tlt.trainer.token_checks import open_tokenizer
from megatron_tlt.types import Prompt

if TYPE_CHECKING:
    from megatron_tlt.data.prompts import PromptStream
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.distributed.world import World
    from megatron_tlt.resilience.signals import StopSignals
    from megatron_tlt.trainer.sft import SftTrainer


def build_trainer(config: Config, world: World, signals: StopSignals | None = None) -> RLTrainer:
    """One rank of an RL run, ready to `run`; `signals` may have come already. Collective. Raises ConfigError with all
    problems at once.
    """
    from megatron_tlt.checkpoint.manager import CheckpointManager

    device_memory.let_segments_grow(world.device, config.by_handles(world.device.type))
    config = with_date(with_teacher_shape(device_memory.with_device_memory(config, world)), world)
    check_on(config, world, place_problems(config))
    tokenizer = open_tokenizer(config)
    environments = open_environments(config, tokenizer, world)
    with before_a_run(config.env):
        prompts = build_prompts(config.data, "train", tokenizer, config.train.seed, prompts_of(environments))
        held_out = held_out_prompts(config.data, tokenizer, config.eval.num_prompts, prompts_of(environments))
    lock, run_dir = _prepare(config, world), Path(config.train.run_dir)

    # Inputs of a batch.
    has_logprobs = CAPABILITIES[config.rollout.backend].logprobs
    algorithm = build_algorithm(config.algorithm, config.rollout.max_tokens, has_logprobs)
    rewards = reward_pool(config, world)

    tp = tensor_parallel(world, config.rollout.tp)
    policy, drafter, backend = build_models(config, world, algorithm, tokenizer, tp)
    state = TrainState()
    turns_of = None if environments is None else environments.turn_rows
    traced_prompts = _traced_prompts(config, world, backend)
    metrics = RunMetrics(config, world, state, backend.drafts_of if traced_prompts else None, turns_of)

    # Around rollout and update.
    queues = prompt_queues(config, world, tp)
    carried = CarriedGroups(world, prompts, config.rollout)
    rollout_cache = build_rollout_cache(config, run_dir, world, tokenizer, backend)
    shutdown = GracefulShutdown(world, config.stop, signals, tp.largest)
    sampler = GroupSampler(
        config=config,
        prompts=prompts,
        carried=carried,
        queues=queues,
        backend=backend,
        rollout_cache=rollout_cache,
        shutdown=shutdown,
        drafter=drafter,
        idle_window=_idle_window(config, world, tp, drafter, metrics),
        rewards=rewards,
        environments=environments,
        pre_rollouts=_pre_rollouts(config, prompts, queues, backend),
        algorithm=algorithm,
        metrics=metrics,
        traced_prompts=traced_prompts,
    )
    temperature, prompts_per_step = config.rollout.temperature, config.train.prompts_per_step
    return RLTrainer(
        config=config,
        world=world,
        state=state,
        sampler=sampler,
        assembler=BatchAssembler(world, policy, algorithm, temperature, prompts_per_step),
        policy=policy,
        drafter=drafter,
        sync=BucketedSync(config.sync, backend, world, hashes=rollout_cache.keeps),
        evaluator=build_evaluator(config, held_out, backend, rewards, queues, environments, repeats=True),
        recovery=Recovery(state=state, prompts=prompts, carried=carried, backend=backend, drafter=drafter),
        metrics=metrics,
        checkpoints=CheckpointManager(config.checkpoint, run_dir, config.train.num_steps, policy, world, lock),
        rollout_cache=rollout_cache,
        nonfinite=NonFiniteGuard(config.train.max_lost_steps, run_dir, world, policy.dims),
        shutdown=shutdown,
    )


def build_sft_trainer(config: SftConfig, world: World, signals: StopSignals | None = None) -> SftTrainer:
    """One rank of a fine-tuning run. Collective. Raises ConfigError with all problems at once, and what `SftTrainer`
    raises.
    """
    from megatron_tlt.trainer.sft import SftTrainer

    device_memory.let_segments_grow(world.device)
    config = with_date(device_memory.with_device_memory(config, world), world)
    check_on(config, world, place_problems(config))
    return SftTrainer(config, world, open_tokenizer(config), signals)


def reward_pool(config: Config, world: World) -> RewardPool:
    """The reward functions on this rank, with heartbeats while it waits. Of an engine's ranks the first one judges,
    with the workers and CPUs of all; they import while it builds its engine. Collective.
    """
    replica_size = config.rollout.tp
    section = config.rewards.model_copy(update={"workers": config.rewards.workers * replica_size})
    pool = RewardPool(section, world.heartbeat, engine_cpus(world, replica_size))
    if is_first_of_engine(world.rank, replica_size):
        pool.warm_up()
    return pool


def prompt_queues(config: Config, world: World, tp: TensorParallel) -> PromptQueues:
    """How the replicas get the prompts of a rollout."""
    rollout = config.rollout
    pulls = rollout.schedule == "pull" and CAPABILITIES[rollout.backend].keyed_sampling
    return PromptQueues(world, tp.size, tp.largest, rollout.max_running_requests if pulls else None)


def build_evaluator(
    config: Config,
    prompts: list[Prompt],
    backend: RolloutBackend,
    rewards: RewardPool,
    queues: PromptQueues,
    environments: Environments | None,
    repeats: bool = False,
) -> Evaluator | None:
    """The evaluator on held-out prompts; None without any. `repeats`: it runs again, with the responses as drafts."""
    if not prompts:
        return None
    drafts = repeats and why_no_eval_drafts(config) is None
    draft_bytes = int(config.idle.pre_rollout_mib * 2**20) if drafts else 0
    params = sampling_params(config)
    return Evaluator(prompts, config.eval, params, backend, rewards, queues, environments, draft_bytes)


def _pre_rollouts(
    config: Config, prompts: PromptStream, queues: PromptQueues, backend: RolloutBackend
) -> PreRoller | None:
    """The next step's drafts from idle windows; None where the run has none."""
    if why_no_pre_rollouts(config, queues.world.size) is not None:
        return None
    params = step_params(config)
    if params.max_turn_tokens:
        params = replace(params, max_tokens=params.max_turn_tokens)
    return PreRoller(
        stream=prompts,
        queues=queues,
        backend=backend,
        params=params,
        num_samples=config.rollout.samples_per_prompt,
        num_prompts=config.train.prompts_per_step,
        last_step=config.train.num_steps,
        max_bytes=int(config.idle.pre_rollout_mib * 2**20),
    )


def _idle_window(
    config: Config,
    world: World,
    tp: TensorParallel,
    drafter: RunDrafter,
    metrics: RunMetrics,
) -> IdleWindow:
    """The idle windows of this rank, with their coordinator. Collective."""
    from megatron_tlt.idle.coordinator import IdleCoordinator

    return IdleWindow(
        IdleCoordinator(world.comm, world.new_counter(), group_size=tp.size),
        config.idle,
        is_group_leader=tp.rank == 0,
        agree=tp.largest,
        num_samples=drafter.num_samples,
        on_span=metrics.rank_state,
        on_poll=lambda state: world.heartbeat(state=state),
    )


def _traced_prompts(config: Config, world: World, backend: RolloutBackend) -> int:
    """Prompts of a rollout whose drafts rank 0 keeps, for the samples that are logged; 0 on other ranks, and where its
    engine traces none.
    """
    if not (world.is_main and backend.capabilities.in_process):
        return 0
    # Samples are written in pairs of one prompt: its best response and its worst.
    return (config.observe.samples_per_step + 1) // 2


def build_rollout_cache(
    config: Config, run_dir: Path, world: World, tokenizer: HFTokenizer, backend: RolloutBackend
) -> RolloutCache:
    """The cache of finished responses in `run_dir`; without keyed sampling nothing is kept."""
    params, model = step_params(config), config.model.path
    identity = {
        **response_identity(params, config.rollout, config.env, model, tokenizer, world.device, world),
        **({} if config.actor.router_replay == "off" else {"routed_experts": True}),
    }
    return RolloutCache(
        config.rollout_cache,
        run_dir / "rollout_cache",
        world,
        backend,
        identity=identity,
        tp=config.rollout.tp,
        fresh=config.checkpoint.resume == "never",
    )


def _prepare(config: Config, world: World) -> RunLock | None:
    """Run directory, determinism. Returns the directory's lock, on rank 0. Collective.

    Raises RunDirectoryError if another job uses the directory.
    """
    deterministic = config.train.is_deterministic(world.device.type)
    if world.device.type == "cuda":
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        if deterministic:  # cuBLAS and Transformer Engine read these at their first use
            os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    else:  # the same, without loading PyTorch's compiler: seconds of every rank's start
        torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    # A debugging aid that comes with it: filling every fresh buffer with NaN costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run_dir = Path(config.train.run_dir)
    lock = lock_run_dir("train.run_dir", config.train.run_dir, run_dir, world)
    world.set_monitor(lambda: start_watchdog(config.hang_s, run_dir, world))
    return lock

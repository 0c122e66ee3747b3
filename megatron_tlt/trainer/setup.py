"""Assembly of a run from its configuration: the only module that imports all of a run's parts.

Order matters: configuration errors are found before weights are loaded, and weight errors before steps are spent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.trtllm.build import build_trtllm
from megatron_tlt.backends.vllm.build import build_vllm
from megatron_tlt.config.checks.files import output_directory_problems
from megatron_tlt.config.dims import rollout_replica
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.prompt_queue import PromptQueues
from megatron_tlt.data.prompts import build_prompts, held_out_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel, TensorParallel
from megatron_tlt.drafter.controller import OnlineDrafterController
from megatron_tlt.drafter.sharing import HiddenStateSharing
from megatron_tlt.errors import ConfigError
from megatron_tlt.idle.policy import IdlePolicy
from megatron_tlt.idle.window import IdleWindow
from megatron_tlt.interfaces import RolloutBackend
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.observe.log import setup_logging
from megatron_tlt.resilience.heartbeat import start_watchdog
from megatron_tlt.resilience.nonfinite import NonFiniteGuard
from megatron_tlt.resilience.rollout_cache import RolloutCache
from megatron_tlt.resilience.run_lock import RunLock, lock_on_all
from megatron_tlt.resilience.shutdown import GracefulShutdown
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.sync.fingerprint import WeightFingerprint
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer import device_memory
from megatron_tlt.trainer.evaluation import Evaluator
from megatron_tlt.trainer.preflight import check_on
from megatron_tlt.trainer.rollout_phase import RolloutPhase
from megatron_tlt.types import CAPABILITIES, BackendName, Prompt, SamplingParams

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.kinds.base import SavedDrafter
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
    from megatron_tlt.models.drafters import DrafterModel
    from megatron_tlt.observe.rollouts import DraftsOf
    from megatron_tlt.resilience.signals import StopSignals
    from megatron_tlt.trainer.loop import RLTrainer
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.trainer.sft import SftTrainer

_BUILDERS: dict[BackendName, Callable[[EngineOptions], RolloutBackend]] = {
    "embedded": build_backend,
    "trtllm": build_trtllm,
    "vllm": build_vllm,
}


def build_trainer(config: Config, world: World, signals: StopSignals | None = None) -> RLTrainer:
    """One rank of an RL run, ready to `run`. Collective. Raises ConfigError with all problems at once.

    `signals` may have come already; without them the run cannot be ended by signals.
    """
    from megatron_tlt.algorithms.build import build_algorithm
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.trainer.batch_assembly import BatchAssembler
    from megatron_tlt.trainer.loop import RLTrainer
    from megatron_tlt.trainer.metrics import RunMetrics

    device_memory.let_segments_grow(world.device, config.rollout.transport)
    config = device_memory.with_device_memory(config, world)
    check_on(config, world, output_directory_problems("train.run_dir", config.train.run_dir))
    tokenizer = open_tokenizer(config)
    prompts = build_prompts(config.data, "train", tokenizer, config.train.seed)
    held_out = held_out_prompts(config.data, tokenizer, config.eval.num_prompts)
    lock = _prepare(config, world)
    run_dir = Path(config.train.run_dir)

    # What a batch is made of.
    algorithm = build_algorithm(config.algorithm, config.rollout.max_tokens)
    rewards = RewardPool(config.rewards, on_verdict=world.heartbeat)
    rewards.warm_up()  # the workers import while this rank builds its engine

    tp = tensor_parallel(world, config.rollout.tp)
    policy, drafter_trainer, backend = build_models(config, world, algorithm, tokenizer, tp)
    metrics = RunMetrics(config, world, _traced_drafts(config, world, backend))

    # What happens around rollout and update.
    drafter = OnlineDrafterController(
        world,
        backend,
        drafter_trainer,
        _sharing(config, world),
        config.rollout.speculation.trained is not None,
    )
    if drafter_trainer is not None and drafter_trainer.from_actor:
        budget = int(config.drafter.sizes(world.device.type).buffer_mib * 2**20)
        dtype = DTYPES[config.rollout.dtype]
        layers, seed = drafter_trainer.model.config.aux_layers, config.drafter.seed
        policy.collect_hidden_states(drafter_trainer.take_step, budget, dtype, layers, seed)

    idle_window = _idle_window(config, world, tp, drafter, metrics)
    rollout_cache = _rollout_cache(config, world, tokenizer, backend)
    shutdown = GracefulShutdown(world, config.stop, signals, tp.largest)
    queues, num_samples = prompt_queues(config, world, tp), config.rollout.samples_per_prompt
    rollout = RolloutPhase(
        world,
        queues,
        sampling_params(config),
        num_samples,
        backend,
        rollout_cache,
        drafter,
        shutdown,
        metrics.on_rollout,
    )
    return RLTrainer(
        config=config,
        world=world,
        prompts=prompts,
        backend=backend,
        rollout=rollout,
        idle_window=idle_window,
        drafter=drafter,
        rewards=rewards,
        algorithm=algorithm,
        assembler=BatchAssembler(world, policy, algorithm, config.rollout.temperature, backend.capabilities.logprobs),
        policy=policy,
        sync=BucketedSync(config.sync, backend, world),
        evaluator=build_evaluator(config, held_out, backend, rewards, queues),
        checkpoints=CheckpointManager(config.checkpoint, run_dir, config.train.num_steps, policy, world, lock),
        metrics=metrics,
        rollout_cache=rollout_cache,
        nonfinite=NonFiniteGuard(config.train.max_nonfinite_steps, run_dir, world, policy.dims),
        shutdown=shutdown,
    )


def build_models(
    config: Config, world: World, algorithm: Algorithm, tokenizer: HFTokenizer, tp: TensorParallel
) -> tuple[MegatronPolicy, OnlineDrafterTrainer | None, RolloutBackend]:
    """Policy, drafter in training (None: none is trained), engine, in the order of the memory plan. Collective.

    The KV cache is what the plan leaves beside everything else, so the engine comes last.
    """
    policy = _policy(config, world, algorithm)
    drafter_trainer = _drafter_trainer(config, world, tp)
    if world.device.type == "cuda":
        device_memory.open_communicators(policy.communicating(), tp, world.device)
    cache = device_memory.cache_bytes(config, world)
    backend = open_backend(config, world, tokenizer, tp, drafter_trainer, kv_cache_bytes=cache)
    return policy, drafter_trainer, backend


def build_sft_trainer(config: SftConfig, world: World) -> SftTrainer:
    """One rank of a fine-tuning run. Collective. Raises ConfigError with all problems at once."""
    from megatron_tlt.trainer.sft import SftTrainer

    device_memory.let_segments_grow(world.device)
    check_on(config, world, output_directory_problems("sft.out", config.sft.out))
    setup_logging(world.rank, world.size)
    return SftTrainer(config, world, open_tokenizer(config))


def open_tokenizer(config: Config | SftConfig) -> HFTokenizer:
    """The tokenizer of the model, or the one named beside it."""
    return HFTokenizer(config.model.tokenizer or config.model.path)


def sampling_params(config: Config) -> SamplingParams:
    """How training rollouts are sampled."""
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop")
    return SamplingParams(**{name: getattr(config.rollout, name) for name in names}, seed=config.train.seed)


def tensor_parallel(world: World, size: int) -> TensorParallel:
    """This rank's place among `size` consecutive ranks that form one engine. Collective over the world."""
    if size == 1:
        return TensorParallel()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
    return GroupTensorParallel(groups[world.rank // size])


def open_backend(
    config: Config,
    world: World,
    tokenizer: HFTokenizer,
    tp: TensorParallel | None = None,
    drafter_trainer: OnlineDrafterTrainer | None = None,
    keep_layers: tuple[int, ...] | None = None,
    kv_cache_bytes: int | None = None,
) -> RolloutBackend:
    """The rollout engine of this rank, without weights; with the drafter of `drafter_trainer`, if there is one.

    A run that trains its drafter may name none: without a trainer the engine then has the random one that training
    would start from. `keep_layers`: see `EngineOptions`. `kv_cache_bytes`: see `device_memory.cache_bytes`. Collective,
    unless `tp` (see `tensor_parallel`) is given.
    """
    if drafter_trainer is not None and config.hidden_states_of == "engine":
        keep_layers = drafter_trainer.model.config.aux_layers
    options = EngineOptions(
        config.rollout,
        config.model,
        config.sync,
        device=world.device,
        tokenizer=tokenizer,
        tp=tp if tp is not None else tensor_parallel(world, config.rollout.tp),
        local_ranks=world.local_size,
        drafter=_drafter(config, drafter_trainer),
        keep_layers=keep_layers,
        keep_routed_experts=config.actor.router_replay == "rollout",
        keep_tables=drafter_trainer is not None,
        kv_cache_bytes=kv_cache_bytes,
    )
    backend = _BUILDERS[config.rollout.backend](options)
    if backend.capabilities.tensor_parallel:  # captured graphs hold collectives of groups that end with the world
        world.at_close(backend.close)
    return backend


def prompt_queues(config: Config, world: World, tp: TensorParallel) -> PromptQueues:
    """How prompts of a rollout come to the replicas."""
    rollout = config.rollout
    pulls = rollout.schedule == "pull" and CAPABILITIES[rollout.backend].keyed_sampling
    return PromptQueues(world, tp.size, tp.largest, rollout.max_running_requests if pulls else None)


def build_evaluator(
    config: Config, prompts: list[Prompt], backend: RolloutBackend, rewards: RewardPool, queues: PromptQueues
) -> Evaluator | None:
    """The evaluator on held-out prompts; None without any."""
    if not prompts:
        return None
    return Evaluator(prompts, config.eval, sampling_params(config), backend, rewards, queues)


def _policy(config: Config, world: World, algorithm: Algorithm) -> MegatronPolicy:
    from megatron_tlt.actor.policy import MegatronPolicy  # megatron takes seconds to import: not for `check`

    return MegatronPolicy(
        world,
        config.model,
        config.actor,
        config.optimizer,
        algorithm,
        total_optimizer_steps=config.train.num_steps * config.algorithm.mini_batches,
        keep_reference=algorithm.needs_reference,
    )


def _drafter(config: Config, trainer: OnlineDrafterTrainer | None) -> SavedDrafter | None:
    """The engine's drafter; None without one."""
    from megatron_tlt.drafter.kinds.base import SavedDrafter

    if trainer is not None:
        return SavedDrafter(trainer.model.config, trainer.weights())
    if config.rollout.speculation.trained is None:
        return None
    model = _starting_drafter(config)
    return SavedDrafter(model.config, model.state_dict())


def _drafter_trainer(config: Config, world: World, tp: TensorParallel) -> OnlineDrafterTrainer | None:
    """This rank's trainer of the drafter; None where it is not trained."""
    if not config.idle.train_drafter:
        return None
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer

    return OnlineDrafterTrainer(
        _starting_drafter(config),
        config.drafter,
        temperature=config.rollout.temperature,
        tp=tp,
        device=world.device,
        from_actor=config.hidden_states_of == "actor",
    )


def _starting_drafter(config: Config) -> DrafterModel:
    """The configured drafter, or, where none is named, one made from the policy's weights: the same on every rank.

    A policy that starts from a Megatron checkpoint may have no weights in `model.path`: its drafter starts at random.
    """
    from megatron_tlt.drafter.checkpoint import drafter_shape, load_drafter
    from megatron_tlt.drafter.kinds.registry import KINDS
    from megatron_tlt.models.loader import weight_reader

    shape = ModelConfig.from_hf(config.model.path)
    path = config.rollout.speculation.drafter_path
    saved = None if path is None else load_drafter(path, shape, config.rollout.speculation)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are overwritten
        made = drafter_shape(config.rollout.speculation, shape) if saved is None else saved.config
        model = KINDS[made.kind].build_model(made)
    if saved is not None:
        model.load_state_dict(saved.weights)
    else:
        model.initialise(config.drafter.seed)
        if config.model.megatron_path is None:
            model.start_from_policy(weight_reader(config.model.path, shape))
    return model


def _sharing(config: Config, world: World) -> HiddenStateSharing:
    online, tp = config.drafter.online, config.rollout.tp
    replica, tp_rank = rollout_replica(world.rank, tp)
    held = config.drafter.sizes(world.device.type).buffer_mib
    is_own = online.max_age == 0 or config.hidden_states_of == "actor"  # the actor's are spread over replicas
    shared = 0 if is_own else int(min(online.share_mib, held) * 2**20)
    return HiddenStateSharing(replica, world.size // tp, tp, shared, tp_rank == 0)


def _idle_window(
    config: Config,
    world: World,
    tp: TensorParallel,
    drafter: OnlineDrafterController,
    metrics: RunMetrics,
) -> IdleWindow:
    """The idle windows of this rank, with their coordinator. Collective."""
    from megatron_tlt.idle.coordinator import IdleCoordinator

    return IdleWindow(
        IdleCoordinator(world.comm, world.new_counter(), group_size=tp.size),
        IdlePolicy.of(config.idle),
        is_group_leader=tp.rank == 0,
        agree=tp.largest,
        num_samples=drafter.num_samples,
        on_span=metrics.state,
        on_poll=lambda state: world.heartbeat(state=state),
        poll_seconds=config.idle.poll_ms / 1e3,
    )


def _traced_drafts(config: Config, world: World, backend: RolloutBackend) -> DraftsOf | None:
    """Rank 0's drafts of the samples that are logged; None: this rank logs no samples, or its engine traces none."""
    if not (world.is_main and backend.capabilities.draft_traces):
        return None
    # Samples are written in pairs of one prompt: its best response and its worst.
    backend.trace_drafts((config.observe.samples_per_step + 1) // 2)
    return backend.drafts_of


def _rollout_cache(config: Config, world: World, tokenizer: HFTokenizer, backend: RolloutBackend) -> RolloutCache:
    """The cache of finished responses; without keyed sampling nothing is kept."""
    rollout = config.rollout
    identity = {
        **asdict(sampling_params(config)),
        "eos": list(tokenizer.eos_token_ids),
        "device": world.device.type,
        **{name: getattr(rollout, name) for name in ("dtype", "kernels", "numerics", "tp")},
        **({} if rollout.backend == "embedded" else {"backend": rollout.backend}),
        **({} if config.actor.router_replay == "off" else {"routed_experts": True}),
    }
    return RolloutCache(
        config.rollout_cache,
        Path(config.train.run_dir),
        world,
        backend,
        WeightFingerprint(world),
        identity=identity,
        tp=rollout.tp,
        fresh=config.checkpoint.resume == "never",
    )


def _prepare(config: Config, world: World) -> RunLock | None:
    """Run directory, logging, determinism. Returns the directory's lock, on rank 0. Collective.

    Raises RunDirectoryError if another job uses the directory.
    """
    setup_logging(world.rank, world.size)
    deterministic = config.train.is_deterministic(world.device.type)
    if world.device.type == "cuda":
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    else:  # the same, without loading PyTorch's compiler: seconds of every rank's start
        torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    # A debugging aid that comes with it: filling every fresh buffer with NaN costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run_dir = Path(config.train.run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # responses and weights are the user's own business
    except OSError as error:
        raise ConfigError.of("train.run_dir", config.train.run_dir, f"cannot be made: {error.strerror}") from error
    lock = lock_on_all(run_dir, world)
    world.set_monitor(lambda: start_watchdog(config.watchdog.heartbeat_s, config.hang_s, run_dir, world))
    if world.is_main:
        dump: dict[str, Any] = config.model_dump(mode="json")
        (run_dir / "config.json").write_text(json.dumps(dump, indent=2) + "\n", encoding="utf-8")
    return lock

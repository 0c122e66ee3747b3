"""Putting a run together from its configuration: the only place that knows all the parts.

Order matters: everything that can be wrong is found before weights are loaded, and weights before steps are spent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_tlt.backends.build import build_backend
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.backends.trtllm.build import build_trtllm
from megatron_tlt.config.root import Config, SftConfig
from megatron_tlt.data.prompts import build_prompts
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.distributed.dims import rollout_replica
from megatron_tlt.distributed.tensor_parallel import (
    GroupTensorParallel,
    SingleRank,
    TensorParallel,
    agree_on,
)
from megatron_tlt.drafter.controller import OnlineDrafterController, Options
from megatron_tlt.drafter.sharing import HiddenStateSharing
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.idle.policy import IdlePolicy
from megatron_tlt.idle.stolen_requests import RequestStealing
from megatron_tlt.idle.window import Coordinator, IdleWindow, SoloCoordinator, Unit
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.observe.gpu import GpuMonitor
from megatron_tlt.observe.log import setup_logging
from megatron_tlt.resilience.rank_watch import start_watch
from megatron_tlt.resilience.rollout_cache import NoRolloutCache, RolloutCache
from megatron_tlt.resilience.run_lock import RunLock, lock_on_all
from megatron_tlt.resilience.shutdown import GracefulShutdown
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.sync.fingerprint import WeightFingerprint
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer.evaluation import Evaluator
from megatron_tlt.trainer.preflight import check_on, without_checkpoints
from megatron_tlt.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer
    from megatron_tlt.interfaces import RolloutBackend, Tokenizer
    from megatron_tlt.models.eagle.model import EagleModel
    from megatron_tlt.resilience.signals import StopSignals
    from megatron_tlt.trainer.loop import RLTrainer
    from megatron_tlt.trainer.metrics import RunMetrics
    from megatron_tlt.trainer.sft import SftTrainer


def build_trainer(config: Config, world: World, signals: StopSignals | None = None) -> RLTrainer:
    """One rank of an RL run, ready to `run`. Collective. Raises ConfigError with all problems at once.

    `signals` may have come already; without them the run cannot be ended by signals.
    """
    from megatron_tlt.actor.policy import MegatronPolicy  # megatron takes seconds to import: not for `check`
    from megatron_tlt.algorithms.build import build_algorithm
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.trainer.loop import RLTrainer
    from megatron_tlt.trainer.metrics import RunMetrics

    check_on(config, world)
    lock = _prepare(config, world)
    tokenizer = open_tokenizer(config)
    algorithm = build_algorithm(config.algorithm, config.rollout.max_tokens)
    prompts = build_prompts(config.data, "train", tokenizer, config.train.seed)
    rewards = RewardPool(config.rewards, on_verdict=world.pulse)
    rewards.warm_up()  # the workers import while this rank builds its engine
    tp = tensor_parallel(world, config.rollout.tp)
    trainer = _drafter_trainer(config, world, tp)
    backend = open_backend(config, world, tokenizer, tp, trainer)
    params = sampling_params(config)
    policy = MegatronPolicy(
        world,
        config.model,
        config.actor,
        config.optimizer,
        algorithm,
        total_optimizer_steps=config.train.num_steps * config.algorithm.mini_batches,
        keep_reference=algorithm.needs_reference,
        seed=config.train.seed,
    )
    drafts_of = None
    takeover = _takeover(config, world, backend, params)
    if world.is_main and isinstance(backend, EmbeddedBackend):
        # Samples are written in pairs of one prompt: its best answer and its worst.
        backend.trace_drafts((config.observe.samples_per_step + 1) // 2)
        drafts_of = backend.drafts_of
    metrics = RunMetrics(config, world, drafts_of)
    return RLTrainer(
        config,
        world,
        prompts=prompts,
        rewards=rewards,
        algorithm=algorithm,
        policy=policy,
        backend=backend,
        upkeep=_upkeep(config, world, backend, tp, trainer, metrics, takeover),
        evaluator=_evaluator(config, world, tokenizer, backend, rewards, params),
        checkpoints=CheckpointManager(
            config.checkpoint, Path(config.train.run_dir), config.train.num_steps, policy, world, lock
        ),
        metrics=metrics,
        rollout_cache=_rollout_cache(config, world, tokenizer, backend, params),
        stop=GracefulShutdown(
            world, config.stop, signals, agree_on(tp, world.device) if config.rollout.tp > 1 else None
        ),
        takeover=takeover,
    )


def build_sft_trainer(config: SftConfig, world: World) -> SftTrainer:
    """One rank of a fine-tuning run. Collective. Raises ConfigError with all problems at once."""
    from megatron_tlt.trainer.sft import SftTrainer

    check_on(config, world)
    setup_logging(world.rank, world.size)
    return SftTrainer(config, world, open_tokenizer(config))


def run_export(config: Config, world: World, out: Path, dtype: str | None) -> None:
    """Writes the checkpoint that `checkpoint.resume` names (default: the run's latest) as a Hugging Face directory.

    `out` appears whole or not at all. Collective. Raises CheckpointError, ConfigError (also where `out` is there).
    """
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.checkpoint.export import export_problems, write_run
    from megatron_tlt.checkpoint.manager import CheckpointManager
    from megatron_tlt.trainer.sft import CompletionLoss

    check_on(_without_drafter(config), world)
    run_dir = Path(config.train.run_dir)
    found = export_problems(out, run_dir, str(config.checkpoint.resume)) if world.is_main else []
    if problems := world.broadcast_object(found):  # only rank 0 writes, perhaps where others see nothing
        raise ConfigError(problems)
    policy = MegatronPolicy(
        world, config.model, config.actor, config.optimizer, CompletionLoss(), config.train.num_steps
    )
    manager = CheckpointManager(config.checkpoint, run_dir, config.train.num_steps, policy, world)
    world.enter("load")
    if manager.load_latest() is None:
        raise CheckpointError(f"no checkpoint in {run_dir / 'checkpoints'}")
    world.enter("export")
    drafter = manager.load_drafter()
    write_run(policy, world, config.model, out, dtype or config.actor.dtype, drafter)
    if world.is_main:
        trained = "" if drafter is None else f", drafter in {out / 'drafter'}"
        print(f"wrote {out} (policy version {policy.policy_version}{trained})", flush=True)


def _without_drafter(config: Config) -> Config:
    """Nobody drafts in an export, so a drafter that the configuration names need not be there, or fit."""
    speculation = config.rollout.speculation.model_copy(update={"drafter": "none"})
    rollout = config.rollout.model_copy(update={"speculation": speculation})
    idle = config.idle.model_copy(update={"train_drafter": False})
    return config.model_copy(update={"rollout": rollout, "idle": idle})


def run_evaluation(config: Config, world: World, out: Path | None) -> None:
    """Evaluates the model in `model.path` on the config's held-out prompts; prints and optionally writes JSON."""
    if config.data.eval is None:
        raise ConfigError.of("data.eval", None, "evaluation needs held-out prompts")
    check_on(without_checkpoints(config), world)
    tokenizer = open_tokenizer(config)
    rewards = RewardPool(config.rewards)
    backend = open_backend(config, world, tokenizer)
    world.enter("load")
    sync = BucketedSync(config.sync, backend, world)
    sync.push(iter_weights(config.model.path, ModelConfig.from_hf(config.model.path)), version=0)
    evaluator = _evaluator(config, world, tokenizer, backend, rewards, sampling_params(config))
    assert evaluator is not None
    world.enter("eval")
    result = evaluator.run(0)
    rewards.close()
    backend.close()
    if world.is_main:
        text = json.dumps(result.to_json(), indent=2)
        print(text, flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")


def open_tokenizer(config: Config | SftConfig) -> HFTokenizer:
    """The tokenizer of the model, or the one named beside it."""
    return HFTokenizer(config.model.tokenizer or config.model.path)


def tensor_parallel(world: World, size: int) -> TensorParallel:
    """This rank's place among `size` consecutive ranks that form one engine. Collective over the world."""
    if size == 1:
        return SingleRank()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
    return GroupTensorParallel(groups[world.rank // size])


def open_backend(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    tp: TensorParallel | None = None,
    trainer: OnlineDrafterTrainer | None = None,
    keep_hidden_states: bool = False,
) -> RolloutBackend:
    """The rollout engine of this rank, without weights; with the drafter of `trainer`, if there is one.

    A run that trains its drafter may name none: without a trainer the engine then has the random one that training
    would start from. Collective, unless `tp` (see `tensor_parallel`) is given.
    """
    if config.rollout.backend == "trtllm":
        return build_trtllm(
            config.rollout, config.model, config.sync, device=world.device, tokenizer=tokenizer
        )
    return build_backend(
        config.rollout,
        config.model,
        config.sync,
        device=world.device,
        tokenizer=tokenizer,
        tp=tp if tp is not None else tensor_parallel(world, config.rollout.tp),
        local_ranks=world.local_size,
        load_weights=False,  # the first push brings them, by the same way as every later one
        drafter=_drafter_weights(config, trainer),
        keep_hidden_states=keep_hidden_states or trainer is not None,
    )


def _drafter_weights(config: Config, trainer: OnlineDrafterTrainer | None) -> Mapping[str, Tensor] | None:
    """What the engine drafts with instead of `drafter_path`; None: that is right."""
    if trainer is not None:
        return trainer.weights()
    section = config.rollout.speculation
    if section.uses_eagle and section.drafter_path is None and config.idle.train_drafter:
        return _starting_drafter(config).state_dict()
    return None


def _drafter_trainer(config: Config, world: World, tp: TensorParallel) -> OnlineDrafterTrainer | None:
    """This rank's trainer of the drafter; None where it is not trained."""
    if not config.idle.train_drafter:
        return None
    from megatron_tlt.drafter.fingerprint import policy_fingerprint
    from megatron_tlt.drafter.online_trainer import OnlineDrafterTrainer

    return OnlineDrafterTrainer(
        _starting_drafter(config).to(world.device),
        config.drafter,
        temperature=config.rollout.temperature,
        tp=tp,
        device=world.device,
        fingerprint=policy_fingerprint(config.model.path, config.model.tokenizer),
    )


def _starting_drafter(config: Config) -> EagleModel:
    """The configured drafter, or, where none is named, one of random weights: the same on every rank."""
    from megatron_tlt.drafter.checkpoint import load_drafter
    from megatron_tlt.models.eagle.model import EagleModel

    shape = ModelConfig.from_hf(config.model.path)
    path = config.rollout.speculation.drafter_path
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that nobody keeps
        model = EagleModel(shape)
    if path is not None:
        model.load_state_dict(load_drafter(path, shape).weights)
    else:
        model.initialise(config.drafter.seed)
    return model


def _upkeep(
    config: Config,
    world: World,
    backend: RolloutBackend,
    tp: TensorParallel,
    trainer: OnlineDrafterTrainer | None,
    metrics: RunMetrics,
    takeover: RequestStealing | None,
) -> OnlineDrafterController:
    """What this rank does while it waits for others. Collective."""
    from megatron_tlt.idle.coordinator import IdleCoordinator  # needs MPI

    coordinator: Coordinator = SoloCoordinator()
    if world.size > 1:
        give = None if takeover is None else takeover.give
        coordinator = IdleCoordinator.of(config.idle, world.comm, tp.size, world.local_size, give)
    window = IdleWindow(
        coordinator,
        IdlePolicy.of(config.idle),
        unit=Unit(tp.rank == 0, agree_on(tp, world.device)) if tp.size > 1 else None,
        samples=None if trainer is None else lambda: len(trainer.buffer),
        on_span=metrics.state,
        on_look=lambda state: world.pulse(state=state),
        poll_seconds=config.idle.poll_ms / 1e3,
        silent_seconds=world.timeout_s,
    )
    uuid = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else None
    sync = BucketedSync(config.sync, backend, world)
    online, (replica, _) = config.drafter.online, rollout_replica(world.rank, tp.size)
    shared = int(min(online.share_mib, online.buffer_mib) * 2**20) if online.max_age else 0
    sharing = HiddenStateSharing(replica, world.size // tp.size, tp.size, shared, tp.rank == 0)
    options = Options(tp.rank == 0, config.rollout.speculation.uses_eagle, GpuMonitor(uuid), sharing)
    if takeover is not None:
        options = replace(options, queued=takeover.queued)
    return OnlineDrafterController(world, backend, sync, window, trainer, options)


def _takeover(
    config: Config, world: World, backend: RolloutBackend, params: SamplingParams
) -> RequestStealing | None:
    """How replicas answer each other's queued requests; None where they do not, or there is one only."""
    if not config.idle.work_stealing or world.size == 1:
        return None
    assert isinstance(backend, EmbeddedBackend), "checked with the configuration"
    return RequestStealing(backend, params, config.rollout.samples_per_prompt, world)


def _rollout_cache(
    config: Config, world: World, tokenizer: Tokenizer, backend: RolloutBackend, params: SamplingParams
) -> RolloutCache | NoRolloutCache:
    """The cache of finished answers; without keyed sampling there is none, which is logged once."""
    rollout = config.rollout
    num_samples = rollout.samples_per_prompt
    if not config.rollout_cache.enabled:
        return NoRolloutCache(backend, params, num_samples)
    if not isinstance(backend, EmbeddedBackend):
        why = f"rollout.backend = {rollout.backend} has no keyed sampling"
        return NoRolloutCache(backend, params, num_samples, why if world.is_main else None)
    identity = {
        **asdict(params),
        "eos": list(tokenizer.eos_token_ids),
        "device": world.device.type,
        **{name: getattr(rollout, name) for name in ("dtype", "kernels", "numerics", "tp")},
    }
    return RolloutCache(
        config.rollout_cache,
        Path(config.train.run_dir),
        world,
        backend,
        params,
        num_samples,
        WeightFingerprint(world),
        identity=identity,
        tp=rollout.tp,
        fresh=config.checkpoint.resume == "never",
    )


def sampling_params(config: Config) -> SamplingParams:
    """How training rollouts are sampled."""
    section = config.rollout
    return SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        max_tokens=section.max_tokens,
        stop=section.stop,
        seed=config.train.seed,
    )


def _evaluator(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    backend: RolloutBackend,
    rewards: RewardPool,
    params: SamplingParams,
) -> Evaluator | None:
    if config.data.eval is None:
        return None
    prompts = build_prompts(config.data, "eval", tokenizer, config.train.seed).next_batch(
        config.eval.num_prompts
    )
    return Evaluator(prompts, config.eval, params, backend, rewards, world, config.rollout.tp)


def _prepare(config: Config, world: World) -> RunLock | None:
    """Run directory, logging, determinism. Returns the directory's lock, on rank 0. Collective.

    Raises RunDirectoryError if another job uses the directory.
    """
    setup_logging(world.rank, world.size)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    else:  # the same, without loading PyTorch's compiler: seconds of every rank's start
        torch.set_deterministic_debug_mode("warn" if config.train.deterministic else "default")
    # A debugging aid that comes with it: filling every fresh buffer with NaN costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run_dir = Path(config.train.run_dir)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # answers and weights are the user's own business
    lock = lock_on_all(run_dir, world)
    share = world.broadcast_object
    world.watched_by(lambda: start_watch(config.watchdog, run_dir, world.rank, world.size, share))
    if world.is_main:
        dump: dict[str, Any] = config.model_dump(mode="json")
        (run_dir / "config.json").write_text(json.dumps(dump, indent=2) + "\n", encoding="utf-8")
    return lock

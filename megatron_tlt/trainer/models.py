"""Policy, drafter and engine of a rank, in the order of the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tlt.backends import build as embedded
from megatron_tlt.backends.options import EngineOptions
from megatron_tlt.backends.trtllm import build as trtllm
from megatron_tlt.backends.vllm import build as vllm
from megatron_tlt.config.checks.pre_rollouts import takes_drafts
from megatron_tlt.config.dims import is_first_of_engine, rollout_replica
from megatron_tlt.config.rollout import SyncSection
from megatron_tlt.distributed.tensor_parallel import GroupTensorParallel, TensorParallel
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.training.run_drafter import RunDrafter
from megatron_tlt.drafters.training.sharing import HiddenStateSharing
from megatron_tlt.interfaces import RolloutBackend
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights, weight_reader
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer import device_memory

if TYPE_CHECKING:
    from megatron_tlt.actor.policy import MegatronPolicy
    from megatron_tlt.algorithms.base import Algorithm
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.base import SavedDrafter
    from megatron_tlt.drafters.model import DrafterModel
    from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
    from megatron_tlt.types import BackendName

_BUILD: dict[BackendName, Callable[[EngineOptions], RolloutBackend]] = {
    "embedded": embedded.build_backend,
    "trtllm": trtllm.build_backend,
    "vllm": vllm.build_backend,
}


def build_models(
    config: Config, world: World, algorithm: Algorithm, tokenizer: HFTokenizer, tp: TensorParallel
) -> tuple[MegatronPolicy, RunDrafter, RolloutBackend]:
    """Policy, drafter, engine, in the order of the memory plan. Collective.

    The KV cache takes the memory that the plan leaves beside everything else, so the engine comes last.
    """
    policy = _policy(config, world, algorithm)
    sharing = _sharing(config, world)
    drafter_trainer = _drafter_trainer(config, world, tp, sharing)
    if world.device.type == "cuda":
        device_memory.open_communicators(policy.communicating(), tp, world.device)
    cache = device_memory.cache_bytes(config, world)
    backend = open_backend(config, world, tokenizer, tp, drafter_trainer, kv_cache_bytes=cache)
    return policy, drafter_trainer or _served_drafter(config, sharing), backend


def tensor_parallel(world: World, size: int) -> TensorParallel:
    """This rank's place among `size` consecutive ranks that form one engine. Collective over the world."""
    if size == 1:
        return TensorParallel()
    timeout = timedelta(seconds=world.timeout_s)  # a new group has PyTorch's own, not that of the world
    groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, world.size, size)]
    return GroupTensorParallel(groups[world.rank // size])


def push_policy(
    model: str | Path,
    backend: RolloutBackend,
    ranks: Ranks | None = None,
    section: SyncSection | None = None,
    hashes: bool = False,
) -> str:
    """The weights of the directory `model` into the engines of `ranks` (None: this process), as policy version 0.
    Returns their fingerprint, which takes a pass over all of them; empty without `hashes`. Collective. Raises
    CheckpointError.
    """
    sync = BucketedSync(section or SyncSection(), backend, ranks or SingleProcess(), hashes)
    sync.push(iter_weights(model, ModelConfig.from_hf(model)), version=0)
    return sync.fingerprint()


def open_backend(
    config: Config,
    world: World,
    tokenizer: HFTokenizer,
    tp: TensorParallel,
    drafter_trainer: OnlineDrafterTrainer | None = None,
    keep_layers: tuple[int, ...] | None = None,
    kv_cache_bytes: int | None = None,
) -> RolloutBackend:
    """The rollout engine of this rank, without weights; with the drafter of `drafter_trainer`, if there is one.

    A run that trains its drafter may name none: without a trainer the engine then has the random one that training
    would start from. `keep_layers`: see `EngineOptions`. `kv_cache_bytes`: see `device_memory.cache_bytes`.
    """
    if drafter_trainer is not None and config.hidden_states_of == "engine":
        keep_layers = drafter_trainer.model.config.aux_layers
    options = EngineOptions(
        config.rollout,
        config.model,
        config.sync,
        device=world.device,
        tokenizer=tokenizer,
        tp=tp,
        local_ranks=world.local_size,
        longest_request=config.longest_sequence,
        drafter=_drafter(config, drafter_trainer),
        keep_layers=keep_layers,
        keep_routed_experts=config.actor.router_replay == "rollout",
        keep_tables=drafter_trainer is not None,
        takes_drafts=takes_drafts(config, world.size),
        kv_cache_bytes=kv_cache_bytes,
    )
    backend = _BUILD[config.rollout.backend](options)
    if backend.capabilities.tensor_parallel:  # captured graphs hold collectives of groups that end with the world
        world.at_close(backend.close)
    return backend


def _policy(config: Config, world: World, algorithm: Algorithm) -> MegatronPolicy:
    from megatron_tlt.actor.policy import MegatronPolicy  # megatron takes seconds to import: not for `check`

    return MegatronPolicy(
        world,
        config.model,
        config.actor,
        config.optimizer,
        algorithm,
        total_optimizer_steps=config.optimizer_steps,
        keep_reference=algorithm.needs_reference,
        teacher=config.algorithm.teacher,
        seed=config.train.seed,
    )


def _drafter(config: Config, trainer: OnlineDrafterTrainer | None) -> SavedDrafter | None:
    """The engine's drafter; None without one."""
    from megatron_tlt.drafters.base import SavedDrafter

    if trainer is not None:
        return SavedDrafter(trainer.model.config, trainer.weights())
    if config.rollout.speculation.trained is None:
        return None
    model = _starting_drafter(config)
    return SavedDrafter(model.config, model.state_dict())


def _served_drafter(config: Config, sharing: HiddenStateSharing) -> RunDrafter:
    """The drafter of a run that does not train it."""
    from megatron_tlt.drafters.checkpoint import configured_drafter

    policy = ModelConfig.from_hf(config.model.path)
    return RunDrafter(configured_drafter(config.rollout.speculation, policy), sharing.replica)


def _drafter_trainer(
    config: Config, world: World, tp: TensorParallel, sharing: HiddenStateSharing
) -> OnlineDrafterTrainer | None:
    """This rank's trainer of the drafter; None where it is not trained."""
    if not config.idle.train_drafter:
        return None
    from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer

    return OnlineDrafterTrainer(
        _starting_drafter(config),
        config.drafter,
        temperature=config.rollout.temperature,
        tp=tp,
        world=world,
        sharing=sharing,
        device=world.device,
        from_actor=config.hidden_states_of == "actor",
        fresh=config.rollout.speculation.drafter_path is None,
        seed=config.train.seed,
    )


def _sharing(config: Config, world: World) -> HiddenStateSharing:
    """What replicas of the engine exchange after a merge."""
    online, tp = config.drafter.online, config.rollout.tp
    held = config.drafter.sizes(world.device.type).buffer_mib
    is_own = config.hidden_states_of == "actor"  # the actor spreads its states over replicas
    shared = 0 if is_own else int(min(online.share_mib, held) * 2**20)
    replica = rollout_replica(world.rank, tp)
    return HiddenStateSharing(replica, world.size // tp, tp, shared, is_first_of_engine(world.rank, tp))


def _starting_drafter(config: Config) -> DrafterModel:
    """The configured drafter, or, where none is named, one made from the policy's weights: the same on every rank."""
    from megatron_tlt.drafters.checkpoint import drafter_shape, load_drafter
    from megatron_tlt.drafters.registry import KINDS

    shape = ModelConfig.from_hf(config.model.path)
    path = config.rollout.speculation.drafter_path
    saved = None if path is None else load_drafter(path, shape, config.rollout.speculation)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are overwritten
        made = drafter_shape(config.rollout.speculation, shape) if saved is None else saved.config
        model = KINDS[made.kind].build_model(made)
    if saved is not None:
        model.load_state_dict(saved.weights)
    else:
        model.initialise(config.train.seed)
        model.start_from_policy(_policy_reader(config, shape))
    return model


def _policy_reader(config: Config, shape: ModelConfig) -> Callable[[str], torch.Tensor]:
    """Reads one of the weights that the policy starts from by its Hugging Face name."""
    if config.model.megatron_path is None:
        return weight_reader(config.model.path, shape)
    from megatron_tlt.actor.torch_dist_reader import TorchDistReader

    return TorchDistReader(config.model.megatron_path).tensor_reader(shape)

"""The actor's process groups, read once from megatron's globals; no other module reads those."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_tlt.actor.compat import HAS_CUDA
from megatron_tlt.config.dims import Coordinates, Dims
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import ConfigError

# isort: split
# megatron comes after compat.
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

_open: Dims | None = None  # of megatron's present globals


@dataclass(frozen=True)
class ActorGroups:
    """Where this rank sits in the actor's grid, and the groups in which it communicates."""

    dims: Dims
    at: Coordinates
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup  # with context parallel ranks: all that hold the same weights, and sum their gradients
    ep: dist.ProcessGroup
    pipeline: tuple[int, ...]  # global ranks of this rank's pipeline, first stage first

    @classmethod
    def create(cls, world: World, dims: Dims) -> ActorGroups:
        """Opens megatron's groups over the whole world. Collective.

        megatron keeps its layout in module globals, so a process holds one layout at a time; a second call
        with the same layout shares the groups (opening them takes seconds), with another one replaces them.
        """
        if world.device.type == "cpu" and HAS_CUDA:
            allowed = "megatron takes the GPU it sees; to run on CPU, hide it with CUDA_VISIBLE_DEVICES=''"
            raise ConfigError.of("distributed.device", "cpu", allowed)
        global _open  # noqa: PLW0603  (mirrors megatron's own globals)
        if _open != dims:
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=dims.tp,
                pipeline_model_parallel_size=dims.pp,
                context_parallel_size=dims.cp,
                expert_model_parallel_size=dims.ep,
                expert_tensor_parallel_size=1,  # None would mean TP
                create_gloo_process_groups=False,
                distributed_timeout_minutes=max(1, round(world.timeout_s / 60)),
            )
            _open = dims
        # No dropout anywhere, so the tracker's fork (which needs CUDA random states) may be a no-op.
        initialize_rng_tracker(inference_rng_tracker=True)
        return cls(
            dims=dims,
            at=dims.coordinates(world.rank),
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            ep=parallel_state.get_expert_model_parallel_group(),
            pipeline=tuple(dims.pipeline_ranks(world.rank)),
        )

    def communicating(self, has_experts: bool, shards_optimizer: bool) -> list[dist.ProcessGroup]:
        """Groups of several ranks in which updates and weight syncs send, kind by kind in one order on all ranks.

        Beside them Transformer Engine passes keys and values between pairs of ranks, with `cp` above 2.
        """
        groups = [dist.group.WORLD, self.dp, self.tp, self.pp, self.cp]
        groups.append(parallel_state.get_embedding_group(check_initialized=False))  # tied weights of two stages
        of_norm = parallel_state.get_intra_distributed_optimizer_instance_group
        groups.append(of_norm() if shards_optimizer else parallel_state.get_model_parallel_group())
        if has_experts:
            groups += [
                self.ep,
                parallel_state.get_tensor_and_context_parallel_group(),
                parallel_state.get_expert_tensor_and_model_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
                parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            ]
        known = dict.fromkeys(group for group in groups if isinstance(group, dist.ProcessGroup))
        return [group for group in known if dist.get_world_size(group) > 1]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the LM head and computes the loss."""
        return self.at.pp == self.dims.pp - 1

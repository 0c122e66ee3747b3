"""megatron's optimizer, and one guarded step: norm, refusal of non-finite gradients, clipping, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.actor.compat import HAS_CUDA, cpu_as_cuda, give_sgd_a_state_function
from megatron_tlt.config.actor import ADAM_EPS, ActorSection, OptimizerSection
from megatron_tlt.models.decoders.base import DTYPES

# isort: split
# megatron comes after compat.
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


def ddp_config(actor: ActorSection, distributed: bool, replicas: int) -> DistributedDataParallelConfig:
    """Gradients collect in fp32 buffers and are summed over replicas once a step: behind backward or with `overlap`.

    megatron awaits a gathered weight where the module that owns it runs forward. Adapters never do, for the product of
    their layer reads them: their weights, which are small, are gathered behind the optimizer's step.
    """
    overlap = replicas > 1 and (HAS_CUDA if actor.overlap == "auto" else actor.overlap == "on")
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed and actor.lora is None,
    )


def wrap_data_parallel(module: Any, config: DistributedDataParallelConfig) -> DistributedDataParallel:
    """megatron's DDP around a stage. Collective with `overlap_param_gather`."""
    with cpu_as_cuda():
        ddp = DistributedDataParallel(module.config, config, module)
    if config.overlap_grad_reduce:
        module.config.no_sync_func = ddp.no_sync  # only the last micro-batch's gradients are communicated
    gather_parameters(ddp)
    return ddp


def gather_parameters(ddp: DistributedDataParallel) -> None:
    """Gathers weights of which the optimizer left the gathering to the next forward. Collective.

    They are read next by a weight sync, an export or a save, or by a forward that not every replica takes part in.
    """
    if ddp.ddp_config.overlap_param_gather:
        with cpu_as_cuda():
            ddp.start_param_sync(force_sync=True)


def optimizer_config(
    section: OptimizerSection, actor: ActorSection, ddp: DistributedDataParallelConfig
) -> OptimizerConfig:
    """Adam or SGD with fp32 master weights under bf16."""
    dtype = DTYPES[actor.dtype]
    return OptimizerConfig(
        optimizer=section.name,
        lr=section.lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=ADAM_EPS,
        sgd_momentum=0.0,
        clip_grad=section.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )


def build_optimizer(ddp: DistributedDataParallel, section: OptimizerSection, actor: ActorSection) -> Any:
    """megatron's optimizer of these weights. Weight decay skips one-dimensional parameters."""
    config = optimizer_config(section, actor, ddp.ddp_config)
    with cpu_as_cuda():
        optimizer = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)
    # The part of weights that no rank trains is a stub, which megatron can neither save nor move: with adapters of
    # experts only, that of all other weights.
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    give_sgd_a_state_function(optimizer)
    return optimizer


@dataclass(frozen=True)
class OptimizerStep:
    """The result of one optimizer step."""

    applied: bool
    lr: float
    grad_norm: float = 0.0
    clipped: bool = False


def guarded_step(optimizer: Any, section: OptimizerSection, lr: float) -> OptimizerStep:
    """Applies the collected gradients with learning rate `lr`, unless their norm is not finite. Collective.

    megatron's own step would multiply an infinite norm into the weights; here such a step leaves weights and
    optimizer state untouched. The norm is the same on every rank, and so is the decision.
    """
    with cpu_as_cuda():
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            return OptimizerStep(applied=False, lr=lr, grad_norm=norm)
        clipped = 0.0 < section.clip_grad < norm
        if clipped:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_grad_by_total_norm_fp32(parameters, max_norm=section.clip_grad, total_norm=norm)
        # The groups carry multipliers that only megatron's own scheduler applies; without it norms and biases
        # would decay. Set at every step, for loading a checkpoint brings the values it was saved with.
        for group in optimizer.param_groups:
            if not HAS_CUDA:  # torch's optimizers there: one pass over memory in place of seven
                group["fused"] = True
            elif "foreach" in group:  # torch's AdamW in place of Transformer Engine's: no temporaries of all parameters
                group["foreach"] = False
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = section.weight_decay * group["wd_mult"]
            if "betas" in group:  # Adam's
                group["betas"] = (section.beta1, section.beta2)
        applied = bool(optimizer.step_with_ready_grads())
    return OptimizerStep(applied=applied, lr=lr, grad_norm=norm, clipped=clipped)

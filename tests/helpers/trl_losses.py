"""Losses and gradients by TRL's own code: `python trl_losses.py IN OUT`, by a Python that has TRL (`make bench-trl`).

IN: a list of batches (`Batch` of test_peers.py) as tensors, with `advantages` [B], `loss_type` and `settings`; OUT: a
list of (loss, gradient [B, T]). `GRPOTrainer._compute_loss` runs on an object with the attributes that it reads.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

_OFF = ("aux_loss_enabled", "_entropy_bonus_enabled")


def trainer_of(request: dict[str, Any], logp: torch.Tensor) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer, whose model gives `logp` [B, T]."""
    settings, zeros = request["settings"], torch.zeros_like(logp)
    names = ("delta", "use_bias_correction_kl")
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        **dict.fromkeys(_OFF, False),
        args=SimpleNamespace(**dict.fromkeys(names), steps_per_generation=1),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("level", "token"),
        beta=settings.get("beta", 0.0),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        use_vllm="cap" in settings,
        vllm_importance_sampling_correction=True,
        loss_type=request["loss_type"],
        max_completion_length=settings.get("max_tokens", 0),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, zeros, None),
    )


def loss_of(request: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """The loss, and its gradient [B, T]."""
    logp, mask = request["logp"].requires_grad_(), request["mask"]
    there = (torch.arange(mask.shape[1]) < request["lengths"][:, None]).to(mask.dtype)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(mask),
        "completion_ids": ids,
        "completion_mask": there,
        "tool_mask": mask,
        "advantages": request["advantages"],
        "old_per_token_logps": request["old"],
        "ref_per_token_logps": request["ref"],
        "num_items_in_batch": mask.sum(),
    }
    if (cap := request["settings"].get("cap")) is not None:
        inputs["importance_sampling_ratio"] = (request["old"] - request["rollout"]).exp().clamp(max=cap)
    loss = GRPOTrainer._compute_loss(trainer_of(request, logp), None, inputs)
    return float(loss.detach()), torch.autograd.grad(loss, logp)[0]


if __name__ == "__main__":
    torch.save([loss_of(request) for request in torch.load(sys.argv[1])], sys.argv[2])

"""What megatron-core 0.16.1's distributed optimizer needs to be saved and loaded over torch's AdamW.

With Transformer Engine or apex (on GPUs) their FusedAdam is underneath and nothing here acts. torch's AdamW
keeps a `step` tensor per parameter, which megatron's code does not expect in two places:

1. sharded_state_dict before the first step asserts that a state exists  -> `prime`
2. after loading all parameters share one step tensor, which AdamW then increments once per parameter
   (silently wrong by 2.5e-4 after one step)  -> `separate_steps`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import megatron_tlt.actor.device  # noqa: F401  (before megatron)

# isort: split
# megatron comes after the device shim.
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def _parts(optimizer: Any) -> Iterator[Any]:
    """The distributed optimizers that hold a torch AdamW."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and isinstance(
            part.optimizer, torch.optim.AdamW | torch.optim.Adam
        ):
            yield part


def prime(optimizer: Any) -> None:
    """Gives parameters without a state the state that AdamW starts from. Mutates the optimizer."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def separate_steps(optimizer: Any) -> None:
    """Gives every parameter a step tensor of its own. Mutates the optimizer."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()

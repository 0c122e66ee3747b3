"""The router of a mixture of experts: in fp32, with replayed choices, auxiliary losses and statistics.

Router replay (R3, arXiv 2510.11370): a token takes the experts that the rollout engine recorded; their gates are still
the softmax of this policy's own logits, so gradients reach the router. A choice of -1 is unknown (a prefix
from the cache, padding) and left to the router.

`Routing` is part of the micro-batch's `PackedRows`, which megatron passes to every layer, also when it recomputes one.
So a layer reads the choices of its own micro-batch under 1F1B and under recompute.

Legend: R rows of a micro-batch on this rank (a slice under sequence or context parallel), E experts, k chosen a token,
L layers with experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.actor.compat import current_device

# isort: split
# megatron comes after compat.
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter


@dataclass
class Routing:
    """Inputs of the routers of one micro-batch, and the statistics that they write."""

    is_token: Tensor  # [R] bool, False for padding
    replays: bool = False  # whether a forward takes the experts that the sequences have recorded
    loss_weight: float = 0.0  # of a row in the auxiliary losses: 1 / rows of the whole update, 0: none
    found: dict[int, Tensor] = field(default_factory=dict)  # layer -> `Router` statistics [E + 3]
    routed_experts: Tensor | None = None  # of the forward under way: [R, L, k] integer, experts to take, -1: unknown


class Router(TopKRouter):
    """Top-k over fp32 logits; gates are their softmax over all experts or, renormalised, over the chosen ones."""

    routing_now: Routing | None = None  # of the micro-batch that the layer runs
    place: int = 0  # among the layers with experts

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., E] fp32. Backward keeps `input` as it is, not a copy in fp32."""
        return moe_utils.router_gating_linear(input, self.weight, None, torch.float32)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gates [R, E] fp32, zero where not chosen, and the choice [R, E] bool."""
        now = self.routing_now
        assert now is not None
        logits = logits.view(-1, self.config.num_moe_experts)
        own = logits.detach().topk(self.topk, dim=-1).indices
        ids = own
        if now.routed_experts is not None:
            forced = now.routed_experts[:, self.place].long()
            ids = torch.where(forced >= 0, forced, own)
        full = logits.softmax(-1)
        gates = full.gather(1, ids) if self.config.moe_router_pre_softmax else logits.gather(1, ids).softmax(-1)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        with torch.no_grad():
            now.found[self.place] = self._statistics(now, full, chosen, own, ids)
        if now.loss_weight:
            gates = _AddLoss.apply(gates, self._auxiliary_loss(now, logits, full, chosen))
        return torch.zeros_like(logits).scatter(1, ids, gates), chosen

    def _statistics(self, now: Routing, full: Tensor, chosen: Tensor, own: Tensor, ids: Tensor) -> Tensor:
        """[E] rows an expert; summed entropy; choices that were replayed; those that the router would not have made."""
        token = now.is_token
        entropy = -torch.where(token, torch.special.xlogy(full, full).sum(-1), 0).sum()  # an index would wait for CUDA
        counts = (chosen & token[:, None]).sum(0)
        replayed = torch.zeros_like(token)
        if now.routed_experts is not None:
            replayed = token & (now.routed_experts[:, self.place] >= 0).all(-1)
        other = (own.sort(-1).values != ids.sort(-1).values).any(-1) & replayed
        return torch.cat([counts.float(), torch.stack([entropy, replayed.sum().float(), other.sum().float()])])

    def _auxiliary_loss(self, now: Routing, logits: Tensor, full: Tensor, chosen: Tensor) -> Tensor:
        """This slice's part of [coefficient * E sum_e f_e P_e + coefficient * mean logsumexp^2] over the update.

        f_e is the share of the micro-batch's choices that fell on expert e, P_e its mean probability (Switch
        Transformer, arXiv 2101.03961, eq. 4); the second term is ST-MoE's z-loss (arXiv 2202.08906, eq. 5).
        """
        config, token = self.config, now.is_token[:, None]
        counts = (chosen & token).sum(0).float()
        if self.tp_cp_group.size() > 1:  # f over the whole micro-batch makes the slices' sum exact
            dist.all_reduce(counts, group=self.tp_cp_group)
        share = counts / counts.sum().clamp_min(1)
        balance = config.num_moe_experts * (share * (full * token).sum(0)).sum()
        z = (logits.logsumexp(-1).square() * token[:, 0]).sum()
        weighted = config.moe_aux_loss_coeff * balance + (config.moe_z_loss_coeff or 0.0) * z
        return weighted * now.loss_weight


class _AddLoss(torch.autograd.Function):
    """The identity of `x`; backward adds the gradient of `loss`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]


def routing_metrics(
    found: Sequence[Routing], layers: int, experts: int, chosen: int, replays: bool
) -> dict[str, float]:
    """Metrics of one update over all its tokens, layers and ranks. Collective over the world.

    `expert_load`: tokens of a layer's fullest expert over the mean, averaged over the layers. `router_entropy`:
    nats. With replay `replayed_share`: choices that were replayed of all, and `replay_flips`: those of them that the
    router itself would have made otherwise. NaN without a token.
    """
    sums = torch.zeros(layers, experts + 3, dtype=torch.float64, device=current_device())
    for routing in found:
        for place, statistics in routing.found.items():
            sums[place] += statistics
    dist.all_reduce(sums)
    counts, totals = sums[:, :experts], sums[:, experts:].sum(0)
    mean = counts.mean(1)
    load = (counts.amax(1) / mean).mean()
    entropy, replayed, flips = (totals / (mean.sum() * experts / chosen)).tolist()
    metrics = {"expert_load": float(load), "router_entropy": entropy}
    if replays:
        metrics |= {"replayed_share": replayed, "replay_flips": flips / replayed if replayed else math.nan}
    return metrics

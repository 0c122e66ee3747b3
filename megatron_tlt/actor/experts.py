"""Layers with a mixture of experts, from megatron's MoELayer and its all-to-all dispatcher.

The experts of a rank are two stacked weights and two grouped matrix products. megatron's SequentialMLP has two
parameters and a dozen kernels an expert: at 48 layers x 128 experts its checkpoints take minutes, stacks a second.
Experts are cut over expert parallel ranks only (megatron's expert tensor parallel size is 1), and expert parallel
takes its ranks from TP x CP x DP.

Legend: E experts, H hidden, F width of an expert, R rows that this rank's experts got, sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_tlt.actor.compat import current_device
from megatron_tlt.actor.elementwise import swiglu
from megatron_tlt.actor.hf_names import expert_fields
from megatron_tlt.actor.lora import AdaptedWeight, Adapter
from megatron_tlt.actor.microbatch import row_multiple
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.models.hf.config import ModelConfig

# isort: split
# megatron comes after compat.
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def expert_config(
    config: ModelConfig, ep: int, aux_loss: float, z_loss: float, fused_permutation: bool
) -> dict[str, Any]:
    """Fields of TransformerConfig for the experts; none for a dense model.

    Auxiliary losses are the router's own (`Router`): megatron's are scaled for another divisor than ours.
    `fused_permutation` needs Transformer Engine 2.1. Without it every layer waits for the device, to select and to
    split rows.
    """
    if not config.num_experts:
        return {}
    return {
        **expert_fields(config),
        "num_moe_experts": config.num_experts,
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": aux_loss,
        "moe_z_loss_coeff": z_loss,
        "moe_permute_fusion": fused_permutation,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,  # None would mean TP
    }


class GroupedExperts(MegatronModule):
    """This rank's experts: [E / EP, 2F, H], each expert's gate rows above its up rows, and [E / EP, H, F]."""

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        pg_collection: Any = None,
        recompute_activation: bool = False,
        lora: LoraSection | None = None,
    ):
        super().__init__(config)
        assert pg_collection.expt_tp.size() == 1
        self._ep, self._replicas = pg_collection.ep, pg_collection.expt_dp
        self._recompute_activation = recompute_activation
        width = config.moe_ffn_hidden_size
        made = {"dtype": config.params_dtype, "device": current_device()}
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * width, config.hidden_size, **made))
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size, width, **made))
        self._adapted = None if lora is None else self._adapt(lora, width)

    def _adapt(self, lora: LoraSection, width: int) -> tuple[AdaptedWeight, AdaptedWeight]:
        """Gives each expert's matrices that are targets adapters of their own. Mutates the module."""
        experts, hidden, dtype = self.fc2.shape[0], self.fc2.shape[1], self.fc2.dtype
        matrices = {
            "gate_proj": ((width, hidden), (0, width)),
            "up_proj": ((width, hidden), (width, 2 * width)),
            "down_proj": ((hidden, width), (0, hidden)),
        }
        made: dict[str, Adapter] = {
            name: Adapter((experts, *shape), lora.rank, rows, dtype)
            for name, (shape, rows) in matrices.items()
            if name in lora.targets
        }
        for name, adapter in made.items():
            self.add_module(name, adapter)
        of_fc2 = [made.pop("down_proj")] if "down_proj" in made else []
        return AdaptedWeight(self.fc1, list(made.values()), lora.scale), AdaptedWeight(self.fc2, of_fc2, lora.scale)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`rows` [R, H], `probs` [R] their gates -> [R, H]. An expert without a row costs nothing.

        `tokens_per_expert` [E / EP] lies on the device of `rows`.
        """
        multiple = row_multiple(rows.dtype, rows.device)
        if multiple == 1:
            return self._outputs(rows, tokens_per_expert, probs), None
        # On CPUs grouped products are one product an expert: each expert's rows have padding behind them.
        gaps = -tokens_per_expert % multiple
        counts = tokens_per_expert + gaps
        at = torch.arange(len(rows)) + (gaps.cumsum(0) - gaps).repeat_interleave(tokens_per_expert)
        padded = rows.new_zeros(int(counts.sum()), rows.shape[1]).index_copy(0, at, rows)
        gates = probs.new_zeros(len(padded)).index_copy(0, at, probs)
        return self._outputs(padded, counts, gates).index_select(0, at), None

    def _outputs(self, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        """Outputs [R, H] of the experts, which have `counts` [E / EP] rows."""
        ends = counts.cumsum(0).to(torch.int32)
        wide = self._product(0, rows, ends, counts)
        if not self._recompute_activation:
            return self._product(1, _gated(wide, probs), ends, counts)
        again = CheckpointWithoutOutput(fp8=None)  # False would mean FP8
        output = self._product(1, again.checkpoint(_gated, wide, probs), ends, counts)
        again.discard_output_and_register_recompute(output)
        return output

    def _product(self, which: int, rows: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        """`rows` by their experts' fc1 (0) or fc2 (1), whose rows end at `ends` [E / EP]."""
        weight = (self.fc1, self.fc2)[which]
        if self._adapted is not None:
            adapted = self._adapted[which]
            return _AdaptedExperts.apply(rows, adapted, ends, counts, *adapted.factors)  # type: ignore[no-any-return]
        taken = _ZeroUnused.apply(weight, counts) if rows.is_cuda else weight
        return F.grouped_mm(rows, taken.transpose(1, 2), offs=ends)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """This rank's experts of [(layers,) E, ...], under the names of megatron's own experts, and their adapters."""
        axis, ep = len(sharded_offsets), self._ep
        named = {"fc1": "experts.linear_fc1.weight", "fc2": "experts.linear_fc2.weight"}
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{named.get(name, name)}",
                parameter,
                *sharded_offsets,
                (axis, ep.rank(), ep.size()),
                prepend_axis_num=axis,
                replica_id=(0, 0, self._replicas.rank()),
            )
            for name, parameter in self.named_parameters()
        }


class _AdaptedExperts(torch.autograd.Function):
    """Rows [R, in] by their experts' merged weights, in the manner of `lora._AdaptedProduct`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, adapted: AdaptedWeight, ends: Tensor, counts: Tensor, *_: Tensor) -> Tensor:
        ctx.adapted = adapted
        ctx.save_for_backward(rows, ends, counts)
        return F.grouped_mm(rows, adapted.value().transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, counts = ctx.saved_tensors
        used = (counts > 0).view(-1, 1, 1)

        def down(y: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(y, weight, offs=ends)

        def outer(y: Tensor, z: Tensor) -> Tensor:
            return torch.where(used, F.grouped_mm(y.t(), z, offs=ends), 0)  # see `_ZeroUnused`

        dx, found = ctx.adapted.gradients(grads[0].contiguous(), rows, down, outer)
        return dx, None, None, None, *found


class _ZeroUnused(torch.autograd.Function):
    """Weights [E, ...] as they are; backward makes the gradients of experts without a row zero.

    `grouped_mm` leaves them undefined on Blackwell (pytorch#172439).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return torch.where((counts > 0).view(-1, 1, 1), grads[0], 0), None


def _gated(wide: Tensor, probs: Tensor) -> Tensor:
    return (swiglu(wide) * probs[:, None]).type_as(wide)


class _Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's dispatcher; of its numbers only the split sizes of an exchange between ranks go to the host."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Rows of each of this rank's experts [E / EP]. On a CPU split sizes become lists, which its exchange takes."""
        counts = super().preprocess(routing_map)
        splits: Any = self
        if not routing_map.is_cuda and splits.input_splits is not None:
            splits.input_splits, splits.output_splits = splits.input_splits.tolist(), splits.output_splits.tolist()
        return counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        """Copies the split sizes to the host and waits for them; `tokens_per_expert` stays on the device.

        megatron copies the counts, too, for grouped products that read them on the host. Ours reads them on the device.
        Without an exchange and with fused permutation there is nothing to wait for.
        """
        if self.input_splits is not None or not self.config.moe_permute_fusion:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class ExpertLayer(MoELayer):
    """Takes the MLP's place. `place`: which of the layers with experts it is; `recompute`: all of it in backward."""

    def __init__(self, config: Any, submodules: MoESubmodules, place: int, recompute: bool):
        super().__init__(config, submodules)
        groups = get_default_pg_collection()
        local = self.num_local_experts, self.local_expert_indices
        self.token_dispatcher = _Dispatcher(*local, config=config, pg_collection=groups)
        self.router.place, self._recompute = place, recompute

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, H] -> [T, 1, H], and no bias."""
        routing = self.router.routing_now  # when it is recomputed, the router's is another micro-batch's

        def run(hidden: Tensor) -> Tensor:
            self.router.routing_now = routing
            return MoELayer.forward(self, hidden)[0]  # type: ignore[no-any-return]

        if self._recompute and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states), None
        return run(hidden_states), None


class RoutedLayer(TransformerLayer):
    """Gives its router the routing of the micro-batch that it runs now."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kw: Any) -> Any:
        """As megatron's."""
        self.mlp.router.routing_now = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kw)

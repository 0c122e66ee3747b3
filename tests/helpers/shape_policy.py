"""One rank of the Megatron policy as shapes on the meta device: what Transformer Engine's layers allocate and keep.

Weights by the slots of `actor/hf_names.py`, offload and export by the real code; the update is a graph of PyTorch's
autograd, so what is kept for backward, and when it dies, is autograd's response, not a formula's.

Legend: T tokens of a micro-batch on this rank, H hidden, s ranks over which sequence parallelism divides the rows, t =
tp.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_tlt.actor.hf_names import shard, slots
from megatron_tlt.actor.logprob import VocabShard, token_statistics
from megatron_tlt.actor.offload import OptimizerOffload
from megatron_tlt.actor.weights import named_tensors
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.planning.policy import micro_batch_tokens, rotation_rows
from megatron_tlt.config.root import Config
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig

META = torch.device("meta")


class _Column(torch.autograd.Function):
    """x [T / s, H] gathered over s, times w [N, H]. Keeps x as it came, and gathers it again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, s: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.s = s
        return _gathered(x, s) @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        full = _gathered(x, ctx.s)
        own = _scattered(grad @ w, ctx.s)
        _ = grad.T @ full  # on its way into the fp32 gradient
        return own, None, None


class _NormColumn(torch.autograd.Function):
    """`_Column` of a norm of x that is computed again on the way back: only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, s: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.s = s
        return _gathered(torch.empty_like(x), s) @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        full = _gathered(torch.empty_like(x), ctx.s)
        _ = _scattered(grad @ w, ctx.s), grad.T @ full
        return torch.empty_like(x), None, None


class _GatedRow(torch.autograd.Function):
    """`_Row` of the activation of x [T, 2 F / t], which is computed again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, s: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.s = s
        return _scattered(x.new_empty(len(x), w.shape[1]) @ w.T, s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        gated, full = x.new_empty(len(x), w.shape[1]), _gathered(grad, ctx.s)
        _ = full.T @ gated, full @ w
        return torch.empty_like(x), None, None


class _Row(torch.autograd.Function):
    """x [T, N] times w [H, N], summed over the ranks and divided over s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, s: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.s = s
        return _scattered(x @ w.T, s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        full = _gathered(grad, ctx.s)
        _ = full.T @ x
        return full @ w, None, None


class _Ring(torch.autograd.Function):
    """Attention of context parallel ranks that pass keys and values around: an output for each of `cp` steps until the
    last one corrects them, two buffers for what arrives and leaves; backward has gradients there as well."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: int) -> Tensor:
        _buffers = [torch.cat([k, v]) for _ in range(2)]
        outputs = [torch.empty_like(q) for _ in range(cp)]
        out = torch.empty_like(q)
        del outputs
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, _ = ctx.saved_tensors
        _buffers = [torch.cat([k, v, k, v]) for _ in range(2)]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


class _Fused(torch.autograd.Function):
    """A fused kernel: one output of `shape`; its input is kept only where its backward reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], is_kept: bool) -> Tensor:
        ctx.like = x.shape
        if is_kept:
            ctx.save_for_backward(x)
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.new_empty(ctx.like), None, None


def _gathered(x: Tensor, s: int) -> Tensor:
    return x if s == 1 else x.new_empty(x.shape[0] * s, *x.shape[1:])


def _scattered(x: Tensor, s: int) -> Tensor:
    return x if s == 1 else x.new_empty(x.shape[0] // s, *x.shape[1:])


class ShapePolicy:
    """See the module. `train_step`, `named_weights` and `on_device` as `MegatronPolicy` has them."""

    def __init__(self, config: Config, shape: ModelConfig, num_ranks: int, stage: int):
        actor = config.actor
        self.config, self.shape, self.stage = config, shape, stage
        self.dims = dims = Dims.fit(num_ranks, actor.tp, actor.pp, actor.cp, actor.ep)
        at, pipeline = SimpleNamespace(tp=0, pp=stage), tuple(range(dims.pp))
        self.groups = SimpleNamespace(dims=dims, at=at, tp=None, pp=None, ep=None, pipeline=pipeline)
        self.redone = actor.recompute_modules if actor.recompute == "selective" else ()
        self.policy_version, dtype = 0, DTYPES[actor.dtype]
        self.weights = self._shards(dtype)
        self.reference = self._shards(dtype) if config.algorithm.kl_coef > 0 else {}
        count = sum(p.numel() for p in self.weights.values())
        self.gradients = torch.empty(count, device=META)
        rows = rotation_rows(config.model.max_context, dims.tp, dims.cp)
        self.rotations = torch.empty(rows, shape.head_dim, device=META)
        experts = sum(p.numel() for name, p in self.weights.items() if ".experts." in name)
        replicas = dims.dp * dims.cp
        divided = -(-(count - experts) // replicas) + -(-experts * dims.ep // (replicas * dims.tp))
        master, *moments = (torch.empty(divided, device=META) for _ in range(3))
        inner = SimpleNamespace(
            param_groups=[{"params": [master]}], state={master: dict(zip("mv", moments, strict=True))}
        )
        self.optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
        self.module = SimpleNamespace(
            parameters=lambda: iter(self.weights.values()), named_parameters=self.weights.items
        )
        self._offload = OptimizerOffload(self, self.optimizer)
        if actor.offload_optimizer:
            self._offload.offload()

    def _shards(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        shapes, found = self.shape.parameter_shapes(), {}
        for slot in slots(self.shape, self.dims.pp):
            if slot.stage == self.stage:
                full = [torch.empty(shapes[name], dtype=dtype, device=META) for name in slot.hf_names]
                parts = self.dims.ep if slot.kind == "experts" else self.dims.tp
                part = shard(self.shape, slot, full, 0, parts)
                found[slot.paths[0]] = nn.Parameter(part.contiguous().clone(), requires_grad=False)
        return found

    # megatron's DDP, as `OptimizerOffload` sees it

    def offload_grad_buffers(self) -> None:
        self.gradients.untyped_storage().resize_(0)

    def restore_grad_buffers(self) -> None:
        self.gradients.untyped_storage().resize_(4 * self.gradients.numel())

    def on_device(self) -> Any:
        return self._offload.on_device()

    def named_weights(self) -> Any:
        return named_tensors(self.module, self.shape, self.groups, lambda p: p.data)

    def train_step(self) -> None:
        """The most micro-batches that are alive at once, forward, then backward."""
        with self.on_device():
            kept = [self._forward() for _ in range(self.dims.pp - self.stage)]
            while kept:
                out = kept.pop(0)
                out.backward(torch.empty_like(out))
        self.policy_version += 1

    def _forward(self) -> Tensor:
        c, t = self.shape, self.dims.tp
        s = t if self.config.actor.sequence_parallel else 1
        tokens = micro_batch_tokens(self.config)
        x = torch.empty(tokens // s, c.hidden_size, dtype=DTYPES[self.config.actor.dtype], device=META)
        x.requires_grad_()
        for layer in range(c.num_layers // self.dims.pp):
            if self.config.actor.recompute == "full":
                x = checkpoint(self._layer, x, layer, s, use_reentrant=True, preserve_rng_state=False)
            else:
                x = self._layer(x, layer, s)
        return x if self.stage < self.dims.pp - 1 else self._loss(x, tokens, s)

    def _layer(self, x: Tensor, index: int, s: int) -> Tensor:
        c, t, at = self.shape, self.dims.tp, f"decoder.layers.{index}."
        heads, groups, d = c.num_heads // t, c.num_kv_heads // t, c.head_dim
        w = {k.removeprefix(at): p for k, p in self.weights.items() if k.startswith(at)}
        qkv = self._normed(x, w["self_attention.linear_qkv.weight"], s)
        q, k, v = qkv.split([heads * d, groups * d, groups * d], dim=1)
        rotated = [_Fused.apply(part, (1, n, len(part), d), False) for part, n in ((q, heads), (k, groups))]
        value = v.view(1, len(v), groups, d).transpose(1, 2)
        if self.dims.cp > 1:
            attended = _Ring.apply(*rotated, value, self.dims.cp)
        else:
            attended = torch.ops.aten._scaled_dot_product_flash_attention(*rotated, value, 0.0, True)[0]
        out = attended.transpose(1, 2).reshape(-1, heads * d)
        x = x + _Row.apply(out, w["self_attention.linear_proj.weight"], s)
        names, mlp = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"), self._mlp
        if "mlp.experts.fc1" in w:
            names, mlp = ("mlp.experts.fc1", "mlp.experts.fc2"), self._experts
        weights = [w[name] for name in names]
        if "mlp" in self.redone:
            return x + checkpoint(mlp, x, *weights, s, use_reentrant=True, preserve_rng_state=False)
        return x + mlp(x, *weights, s)

    def _experts(self, x: Tensor, fc1: Tensor, fc2: Tensor, s: int) -> Tensor:
        """Twice as many rows as an even share: norm, router's tables, rows, the experts' products, rows back."""
        c = self.shape
        rows = 2 * c.num_experts_per_tok * len(x)
        normed = _norm(x)
        tables = [_Fused.apply(normed, (len(x), 2 * c.num_experts), True) for _ in range(4)]  # fp32
        inner = _Fused.apply(normed, (rows, c.hidden_size), False)
        up = _Fused.apply(inner, (rows, fc1.shape[1]), True)
        gated = _Fused.apply(up, (rows, fc2.shape[2]), True)
        out = _Fused.apply(_Fused.apply(gated, tuple(gated.shape), True), (rows, c.hidden_size), True)
        return _Fused.apply(out, tuple(x.shape), False) + sum(table[:, :1] for table in tables)

    def _normed(self, x: Tensor, w: Tensor, s: int) -> Tensor:
        """A product of the norm of x."""
        return _NormColumn.apply(x, w, s) if "layernorm" in self.redone else _Column.apply(_norm(x), w, s)

    def _mlp(self, x: Tensor, fc1: Tensor, fc2: Tensor, s: int) -> Tensor:
        up = self._normed(x, fc1, s)
        if "mlp_act" in self.redone:
            return _GatedRow.apply(up, fc2, s)
        return _Row.apply(_Fused.apply(up, (len(up), up.shape[1] // 2), True), fc2, s)

    def _loss(self, x: Tensor, tokens: int, s: int) -> Tensor:
        tied = self.weights.get("embedding.word_embeddings.weight")
        head = self.weights.get("output_layer.weight", tied)
        rows = _Fused.apply(_norm(x), (tokens, self.shape.hidden_size), False)  # gathered, and selected
        logits = _Column.apply(rows, head, 1)
        labels = torch.empty(tokens, dtype=torch.int64, device=META)
        part = VocabShard(0, logits.shape[1], None)
        return token_statistics(logits, labels, part, 1.0, True)[0].sum()


def _norm(x: Tensor) -> Tensor:
    return _Fused.apply(x, tuple(x.shape), True)

"""Recompute of single modules of a layer, where megatron-core 0.16.1 has it for other layers only.

`mlp_act`: the activation's output is the input of the MLP's second product, which keeps it. It is freed after the
forward pass and computed again from fc1's output, which the activation keeps anyway: F of 3F numbers a token, for an
elementwise pass. megatron has this for experts (`moe_act`); `layernorm` and `mlp` are megatron's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import megatron_tlt.actor.compat  # noqa: F401  (before megatron)

# isort: split
# megatron comes after compat.
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.mlp import MLP


class RecomputedActivationMLP(MLP):
    """megatron's MLP without biases; keeps no output of the activation. Its parameters are those of MLP."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> [T, 1, H], and no bias."""
        wide, _bias = self.linear_fc1(hidden_states)
        again = CheckpointWithoutOutput(fp8=None)  # False would mean FP8
        output, bias = self.linear_fc2(again.checkpoint(self._activated, wide))
        again.discard_output_and_register_recompute(output)
        return output, bias

    def _activated(self, wide: Tensor) -> Tensor:
        if self.config.use_te_activation_func:  # the spec's
            return self.activation_func(wide)  # type: ignore[no-any-return]
        return bias_swiglu_impl(wide, None)  # type: ignore[no-any-return]


@contextmanager
def no_recomputed_norms(module: nn.Module) -> Iterator[None]:
    """Inside, megatron's layers recompute no norms: for passes without gradients.

    megatron's recompute of a norm counts as FP8 (`CheckpointWithoutOutput`, default `fp8=False`). Its forward appends
    to a list of Transformer Engine (`activation_recompute_forward`), and only a backward pass removes entries, at the
    front. After a pass without gradients the list stays longer for the rest of the run, and every update moves it.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, TransformerLayer)]
    flags = [(layer.recompute_input_layernorm, layer.recompute_pre_mlp_layernorm) for layer in layers]
    _set_norms(layers, [(False, False)] * len(layers))
    try:
        yield
    finally:
        _set_norms(layers, flags)


def _set_norms(layers: list[TransformerLayer], flags: list[tuple[bool, bool]]) -> None:
    for layer, (before_attention, before_mlp) in zip(layers, flags, strict=True):
        layer.recompute_input_layernorm = before_attention
        layer.recompute_pre_mlp_layernorm = before_mlp

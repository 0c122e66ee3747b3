"""What an EAGLE-3 drafter is trained on: outputs of three policy layers beside the final hidden state.

Legend: T rows, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.torch.attention import Plan
from megatron_tlt.models.torch.decoder import TorchDecoder
from megatron_tlt.models.torch.layers import rms_norm


class FeatureDecoder(TorchDecoder):
    """A policy whose `all_hidden` is [T, 4H]: the outputs of layers a, b, c, then the state after the final norm."""

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, int, int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(config, device, dtype)
        self._wanted = layers
        self._taken: list[Tensor] = []

    def forward(self, batch: DecoderInput, kv: KVCache) -> DecoderOutput:
        """See `base.Decoder.forward`."""
        out = super().forward(batch, kv)
        if out.all_hidden is None:
            return out
        return DecoderOutput(out.logits, out.hidden, torch.cat([*self._taken, out.all_hidden], dim=-1))

    def _layers_forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: KVCache, plan: Plan
    ) -> Tensor:
        self._taken = []
        rope, x = self._rope[positions], self._embed[token_ids]
        for index, (layer, cache) in enumerate(zip(self._layers, kv.data, strict=True)):
            h = rms_norm(x, layer["input_layernorm"], self.config.rms_norm_eps)
            x = x + self._attention(layer, h, cache, rope, slots, plan)
            h = rms_norm(x, layer["post_attention_layernorm"], self.config.rms_norm_eps)
            x = x + self._mlp(layer, h)
            if index in self._wanted:
                self._taken.append(x)
        return x

"""The EAGLE drafter of a Qwen3 policy for vLLM 0.32, which has the class for Llama only.

One Qwen3 layer (queries and keys are normalised) without its input norm, behind `fc [E(token) ; hidden state]`. vLLM
puts `Eagle` before the architecture that the drafter's config.json names. Embedding and head are the policy's.

Legend: T packed tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM, LlamaModel
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import get_draft_quant_config, maybe_prefix


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0})
class EagleQwen3Model(nn.Module):
    """The layer and what is before it."""

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: Any, prefix: str = "", start_layer_id: int = 0) -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        quantization = get_draft_quant_config(vllm_config)
        self.config, self.vocab_size = config, config.vocab_size
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        # The number in a layer's name gives it a KV cache of its own: it follows the policy's layers.
        name = maybe_prefix(prefix, f"layers.{start_layer_id}")
        layer = Qwen3DecoderLayer(config, vllm_config.cache_config, quantization, prefix=name)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.fc = ReplicatedLinear(
            2 * config.hidden_size,
            config.hidden_size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            quant_config=quantization,
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H]."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden states [T, H], for the head and for the next step."""
        x = self.fc(torch.cat((self.embed_tokens(input_ids), hidden_states), dim=-1))
        x, residual = self.layers[0](positions, x, None)
        x = x + residual
        return x, x

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads tensors by name; returns what was loaded."""
        loaded: set[str] = LlamaModel.load_weights(self, weights)
        return loaded


class EagleQwen3ForCausalLM(EagleLlamaForCausalLM):  # type: ignore[misc]  # of another environment: untyped here
    """What vLLM's EAGLE proposer runs."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.model = EagleQwen3Model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), start_layer_id=layers
        )
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

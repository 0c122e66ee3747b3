"""Block drafters (DSpark, DFlash) for vLLM 0.32's first model runner, which proposes for DFlash only.

vLLM's own classes, but the keys and values of the features come from the layers' own projections: vLLM's copies of
them, which it makes when it loads weights, have on CPUs nothing to be made of in a later weight sync.

`fill_blocks` makes its proposer one of DSpark: blocks whose slots give the token behind them, and a Markov head that
reads the token before.

Legend: T features, B requests, S slots of a block, K drafted tokens of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM, Qwen3DSparkModel


class _Context:
    """Keys and values of features [T, H], whose weights are the layers' at every moment."""

    hidden_norm: Any
    layers: Any

    def precompute_and_store_context_kv(self, *args: Any) -> None:
        """Writes those of features into the cache. In a weight sync the rotary table is another tensor for a while."""
        self._rope_cos_sin_cache = self.layers[0].self_attn.rotary_emb.cos_sin_cache
        super().precompute_and_store_context_kv(*args)  # type: ignore[misc]

    def _project_context_kv(
        self, context_states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Two of [layers, T, kv heads, D]."""
        features = self.hidden_norm(context_states)
        products = [layer.self_attn.qkv_proj(features)[0] for layer in self.layers]
        both = torch.stack([p[:, -2 * num_kv_heads * head_dim :] for p in products])
        keys, values = both.view(num_layers, num_ctx, 2, num_kv_heads, head_dim).unbind(2)
        return keys.contiguous(), values.contiguous()

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        """Of [layers, T, kv heads, D]."""
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])


class _DFlashModel(_Context, DFlashQwen3Model):  # type: ignore[misc]  # of another environment: untyped here
    confidence_head = None


class _DSparkModel(_Context, Qwen3DSparkModel):  # type: ignore[misc]
    pass


class DFlashBlockForCausalLM(Qwen3DSparkForCausalLM):  # type: ignore[misc]
    """What vLLM's proposer of DFlash runs: with a Markov head where config.json has a rank."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self.model_cls = _DSparkModel if config.markov_rank else _DFlashModel
        DFlashQwen3ForCausalLM.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.target_vocab_size = vllm_config.model_config.get_vocab_size()


def fill_blocks(drafter: Any, sample: Callable[[Tensor], Tensor]) -> None:
    """From now on vLLM's proposer fills whole blocks, whose tokens `sample(logits [B, V])` draws from left to right.
    Mutates it; `tlt_wanted`, set before each proposal, is how many of the K are drawn, the others are 0.
    """
    config, set_inputs = drafter.draft_model_config.hf_config, drafter.set_inputs_first_pass

    def set_anchored_inputs(**inputs: Any) -> tuple[int, Tensor, Any]:
        """One slot less than for DFlash, every one of which drafts; without a draft the features are still cached."""
        drafted = drafter.num_speculative_tokens
        drafter.num_speculative_tokens = max(0, drafted - 1)
        count, _, metadata = set_inputs(**inputs)
        drafter.num_speculative_tokens = drafted
        return count, drafter.arange[: count if drafted else 0], metadata

    def sample_block(hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, None]:
        """Tokens int64 [B K] of outputs [B K, H]."""
        model, size = drafter.model, drafter.num_speculative_tokens
        logits = model.compute_draft_logits(hidden_states).unflatten(0, (-1, size))
        out = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        slots = size + (not config.sample_from_anchor)
        before = drafter.input_ids[: len(out) * slots : slots]  # the anchors
        for k in range(drafter.tlt_wanted):
            scores = logits[:, k]
            if config.markov_rank:
                scores = scores + model.markov_bias(model.markov_embed(before))
            before = out[:, k] = sample(scores)
        return out.flatten(), None

    drafter._sample_draft_tokens = sample_block
    if config.sample_from_anchor:
        drafter.set_inputs_first_pass = set_anchored_inputs

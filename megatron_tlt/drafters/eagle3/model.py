"""The EAGLE-3 drafter (2503.01840), which TensorRT-LLM, SGLang and vLLM serve for policies of every family.

    g_s = fc [f_a ; f_b ; f_c]_s                      outputs of three policy layers at s
    r   = g_{s-1},  x_s = [norm(E(token_s)) ; norm(r)]
    r'  = r + attention(x_s),  o_s = r' + mlp(norm(r'))
    logits of the token at s + 1 = lm_head norm(o_s), over the drafter's own vocabulary

Further drafts read o_s in place of g_s. The layer is Llama's for every policy (no bias, no norm of queries and keys),
because all three engines require it. Names are those that they read.

Legend: T packed tokens, N bases, H hidden size, V vocabulary, Vd the drafter's, W width of a policy's state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.eagle.model import Attention, Mlp, Norm, PairModel
from megatron_tlt.models.decoders.torch.layers import rms_norm
from megatron_tlt.models.hf.config import EMBED, HEAD, ModelConfig


class Layer3(nn.Module):
    """The layer of EAGLE-3, over embedding and features side by side."""

    def __init__(self, shape: ModelConfig):
        super().__init__()
        h = shape.hidden_size
        self.self_attn, self.mlp = Attention(shape, 2 * h), Mlp(shape)
        self.hidden_norm, self.input_layernorm = Norm(h), Norm(h)
        self.post_attention_layernorm = Norm(h)


class Eagle3Model(PairModel):
    """The EAGLE-3 drafter's weights and arithmetic. `lm_head` is trained, too: it begins as the policy's."""

    imitates_states = False
    head_parameters = ("lm_head.weight",)
    config: Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        h = config.policy.hidden_size
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = Layer3(config.layer)
        self.norm = Norm(h)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)

    def initialise(self, seed: int) -> None:
        """Random weights; fc starts with the identity on the highest layer, the closest to the policy's output."""
        h = self.config.policy.hidden_size
        self.draw_weights(seed, ("o_proj", "down_proj", "fc.weight"))
        with torch.no_grad():
            self.fc.weight[:, 2 * h :] += torch.eye(h, device=self.fc.weight.device)

    def start_from_policy(self, read: Callable[[str], Tensor]) -> None:
        """Replaces the weights of `initialise` by those of the policy's second layer, final norm and LM head.

        The layer's projections read embedding and features alike; its output projections are scaled down, as in EAGLE.
        """
        self.take_layer(read)
        with torch.no_grad():
            self.norm.weight.copy_(read("model.norm.weight"))
        self.take_head(read(EMBED if self.config.policy.tie_word_embeddings else HEAD))

    def take_head(self, head: Tensor) -> None:
        """The head becomes the rows of the drafter's tokens in the policy's `head` [V, H]."""
        ids = self.token_ids()
        with torch.no_grad():
            self.lm_head.weight.copy_(head if ids is None else head[ids.to(head.device)])

    def own_head(self, policy_rows: Tensor | None) -> Tensor:
        """Its own."""
        return self.lm_head.weight

    def before_head(self, outputs: Tensor) -> Tensor:
        """Normed."""
        return rms_norm(outputs, self.norm.weight, self.config.layer.rms_norm_eps)

    @property
    def block(self) -> Layer3:
        return self.midlayer

    def previous(self, states: Tensor) -> Tensor:
        """g [T, H] of three layers' outputs, with which the states [T, 4H] begin."""
        return linear(states[:, : 3 * self.config.policy.hidden_size], self.fc.weight)

    def join(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """[T, 2H]."""
        left = rms_norm(embedded, self.midlayer.input_layernorm.weight, self.config.layer.rms_norm_eps)
        return torch.cat([left, self._normed(previous)], dim=-1)

    def residual(self, x: Tensor, previous: Tensor) -> Tensor:
        """The features of the position before, normed with `norm_before_residual`."""
        return self._normed(previous) if self.config.norm_before_residual else previous

    def _normed(self, previous: Tensor) -> Tensor:
        return rms_norm(previous, self.midlayer.hidden_norm.weight, self.config.layer.rms_norm_eps)

"""Drafters in PyTorch, for training and for rollouts of the PyTorch decoder: the base of EAGLE and EAGLE-3, and EAGLE.

    x_s = fc [E(token_s) ; h_{s-1}],   o_s = layer(x_s)  (no norm before attention, none at the end)

o_s stands for the policy's hidden state h_s after its final norm, so the policy's LM head reads it (EAGLE,
2401.15077, section 3; without those two norms and with hidden states behind the final one, as in TLT, 2511.16665).

Legend: T rows or packed tokens, B sequences, N bases, H hidden size, D head size, K longest sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.pairs import PairLayout, attend_pairs, take
from megatron_tlt.drafters.model import DraftBatch, DrafterConfig, DrafterModel
from megatron_tlt.models.decoders.torch.layers import rms_norm, rotate
from megatron_tlt.models.hf.config import ModelConfig

START_SCALE = 0.3  # of the output projections of a policy's layer in a drafter made from it


class Norm(nn.Module):
    """The weight of a norm, under the name that checkpoints have."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """The projections of a layer of `config` that reads `inputs` values."""

    def __init__(self, config: ModelConfig, inputs: int):
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_heads * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, config.num_kv_heads * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, config.num_kv_heads * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * d, h, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(d), Norm(d)


class Mlp(nn.Module):
    """The MLP of a layer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DrafterLayer(nn.Module):
    """The layer of EAGLE: one of the policy's without the norm before its attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = Mlp(config)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [T, F] each."""
    return silu(gate) * up


class PairModel(DrafterModel):
    """A drafter of one layer over pairs: arithmetic and training unroll of both kinds."""

    imitates_states = True  # its outputs stand for the policy's hidden states, behind the same LM head

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self._config = config.layer

    @property
    @abstractmethod
    def block(self) -> Any:
        """The layer: `self_attn`, `mlp` and `post_attention_layernorm`."""

    @property
    def source_layer(self) -> int:
        """The policy's layer that `take_layer` takes."""
        return min(1, self.config.policy.num_layers - 1)

    def take_layer(self, read: Callable[[str], Tensor]) -> None:
        """The layer becomes the policy's second one, its output scaled down; inputs twice as wide are read alike.

        A policy's layer with experts has no MLP of this form: the drafter's stays as it is.
        """
        policy, block, index = self.config.policy, self.block, self.source_layer
        with torch.no_grad():
            for name, p in block.named_parameters():
                if name.startswith("mlp.") and index in policy.moe_layers:
                    continue
                given = read(f"model.layers.{index}.{name.replace('hidden_norm', 'input_layernorm')}")
                p.copy_(given if p.shape == given.shape else torch.cat([given, given], dim=1))
            for added in (block.self_attn.o_proj, block.mlp.down_proj):
                added.weight.mul_(START_SCALE)

    @abstractmethod
    def previous(self, states: Tensor) -> Tensor:
        """The part [T, H] of the policy's states [T, W] of the position before that a pair reads."""

    @abstractmethod
    def join(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Inputs x of attention, of the tokens' embeddings at s and `previous` of s - 1, [T, H] each."""

    @abstractmethod
    def residual(self, x: Tensor, previous: Tensor) -> Tensor:
        """The residual stream [T, H] that attention's output is added to."""

    def linears(self) -> list[tuple[nn.Module, str, nn.Linear]]:
        """The layer's, not `fc`."""
        parents = (self.block.self_attn, self.block.mlp)
        return [(p, n, m) for p in parents for n, m in p.named_children() if isinstance(m, nn.Linear)]

    # -- behind the layer: here those of kind eagle

    def own_head(self, policy_rows: Tensor | None) -> Tensor:
        """The LM head [Vd, H] of the drafter; `policy_rows` [Vd, H] are the policy's, which kind eagle needs."""
        assert policy_rows is not None
        return policy_rows

    def before_head(self, outputs: Tensor) -> Tensor:
        """The head's input, of outputs [.., H]."""
        return outputs

    def logits(self, outputs: Tensor, head: Tensor | None = None) -> Tensor:
        """Of outputs o [.., H]."""
        if head is not None and (ids := self.token_ids()) is not None:
            head = head.index_select(0, ids)
        return linear(self.before_head(outputs), self.own_head(head))

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """[T, query heads, D], rotated."""
        a = self.block.self_attn
        q = a.q_proj(x).unflatten(-1, (-1, self._config.head_dim))
        if self._config.qk_norm:
            q = rms_norm(q, a.q_norm.weight, self._config.rms_norm_eps)
        return rotate(q, rope)

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [T, kv heads, D]; keys rotated."""
        a, d = self.block.self_attn, self._config.head_dim
        k, v = a.k_proj(x).unflatten(-1, (-1, d)), a.v_proj(x).unflatten(-1, (-1, d))
        if self._config.qk_norm:
            k = rms_norm(k, a.k_norm.weight, self._config.rms_norm_eps)
        return rotate(k, rope), v

    def finish(self, x: Tensor, previous: Tensor, attended: Tensor) -> Tensor:
        """Outputs [T, H]: the layer behind its attention, which gave `attended` [T, query heads, D]."""
        block, mlp = self.block, self.block.mlp
        x = self.residual(x, previous) + block.self_attn.o_proj(attended.flatten(1))
        y = rms_norm(x, block.post_attention_layernorm.weight, self._config.rms_norm_eps)
        # computed again on the way back: its inside is the widest activation of all
        wide = checkpoint(gated, mlp.gate_proj(y), mlp.up_proj(y), use_reentrant=False, preserve_rng_state=False)
        out: Tensor = x + mlp.down_proj(wide)
        return out

    def unroll(self, embed: Tensor, batch: DraftBatch, layout: PairLayout, steps: int) -> list[Tensor]:
        """Drafts `steps` tokens ahead from every base, fed with the true tokens: [N, H] for each step.

        Step 0 reads the policy's hidden states. Step j >= 1 reads the output of step j - 1 at the same base instead,
        and attends to the pairs of a draft from there: the true pairs up to the base, then its own steps 1 .. j
        (training-time test, EAGLE-3, 2503.01840, section 3.2; HASS, 2408.15766, section 3.2). Entry [n] of step j
        predicts the hidden state at s + j and the token at s + j + 1 for base s = `layout.bases[n]`.
        """
        longest = layout.longest + steps
        embedded = embed[batch.tokens].to(next(self.parameters()).dtype)
        # a sequence's first token has no pair: no row attends to it
        previous = self.previous(batch.hidden.to(embedded.dtype)).roll(1, 0)
        x = self.join(embedded, previous)
        keys, values = self.keys_values(x, self.rope(layout.positions, longest))
        far = [take(t, layout.keys).transpose(1, 2) for t in (keys, values)]  # [B, kv, K, D]
        x, previous = x.index_select(0, layout.bases), previous.index_select(0, layout.bases)
        position = layout.positions[layout.bases]
        chain: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            rope = self.rope(position + step, longest)
            if step:
                previous = outputs[-1]
                x = self.join(embedded.index_select(0, layout.rows(step)), previous)
                chain.append(self.keys_values(x, rope))
            attended = attend_pairs(self.queries(x, rope), far[0], far[1], chain, layout)
            outputs.append(self.finish(x, previous, attended))
        return outputs


class EagleModel(PairModel):
    """The EAGLE drafter's weights and arithmetic."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        policy = config.policy
        self.fc = nn.Linear(2 * policy.hidden_size, policy.hidden_size, bias=False)
        self.layer = DrafterLayer(config.layer)

    def initialise(self, seed: int) -> None:
        """Random weights under which o_s is almost h_{s-1}, a better first guess than noise."""
        h = self.config.policy.hidden_size
        self.draw_weights(seed, ("o_proj", "down_proj"))
        with torch.no_grad():
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, h:] += torch.eye(h, device=self.fc.weight.device)

    def start_from_policy(self, read: Callable[[str], Tensor]) -> None:
        """Replaces the weights of `initialise` by those of the policy's second layer, which learn faster.

        The layer reads the embedding beside the hidden state; its output is scaled down, so that o_s is still close
        to h_{s-1}. The norm before the policy's attention becomes part of the projections: they read states as the
        final norm scales them. Without it, queries and keys of a real model are ten times too large, and the softmax
        of their products passes no gradient.
        """
        self.take_layer(read)
        with torch.no_grad():
            h, attention = self.config.policy.hidden_size, self.layer.self_attn
            scale = read(f"model.layers.{self.source_layer}.input_layernorm.weight").float()
            scale = scale / read("model.norm.weight").float().square().mean().sqrt()  # the size of a state
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.mul_(scale.to(projection.weight))
            self.fc.weight[:, :h] = torch.eye(h, device=self.fc.weight.device)

    @property
    def block(self) -> DrafterLayer:
        return self.layer

    def previous(self, states: Tensor) -> Tensor:
        """The hidden states themselves."""
        return states

    def join(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """x [T, H] of pairs: embedding of the token at s, hidden state of s - 1."""
        return linear(torch.cat([embedded, previous.to(embedded.dtype)], dim=-1), self.fc.weight)

    def residual(self, x: Tensor, previous: Tensor) -> Tensor:
        """x."""
        return x

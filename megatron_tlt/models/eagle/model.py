"""The EAGLE drafter in PyTorch: one class for training and for rollouts outside the native decoder.

    x_s = fc [E(token_s) ; h_{s-1}],   o_s = layer(x_s)  (no norm before attention, none at the end)

o_s stands for the policy's hidden state h_s after its final norm, so the policy's LM head reads it (EAGLE,
2401.15077, section 3; without those two norms and with hidden states behind the final one, as in TLT, 2511.16665).

Legend: T rows or packed tokens, B sequences, N bases, H hidden size, D head size, K longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout, attend, take
from megatron_tlt.models.torch.layers import rms_norm, rope_table, rotate

_FIRST_POSITIONS = 4096  # rotary table at start; it grows by need


class _Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(h, config.num_heads * d, bias=config.qkv_bias)
        self.k_proj = nn.Linear(h, config.num_kv_heads * d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(h, config.num_kv_heads * d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * d, h, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = _Norm(d), _Norm(d)


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size)
        self.mlp = _Mlp(config)


class EagleModel(nn.Module):
    """The drafter's weights and arithmetic. Its state is `eagle_parameter_shapes`.

    Embedding and LM head are the policy's and are given at every call.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = _Layer(config)
        self._rope = rope_table(config, min(config.max_position_embeddings, _FIRST_POSITIONS))

    def initialise(self, seed: int) -> None:
        """Random weights under which o_s is almost h_{s-1}, a better first guess than noise."""
        h = self.config.hidden_size
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    p.zero_()
                elif p.ndim == 1:
                    p.fill_(1.0)
                else:
                    scale = 0.2 if "o_proj" in name or "down_proj" in name else 1.0
                    p.copy_(torch.randn(p.shape, generator=generator) * scale * p.shape[1] ** -0.5)
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, h:] += torch.eye(h, device=self.fc.weight.device)

    def load_full(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes all tensors. Raises CheckpointError unless they are all of `eagle_parameter_shapes`."""
        given = dict(named)
        check_eagle_tensors(given, self.config)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(given[name])

    # -- arithmetic -----------------------------------------------------------------------------------------

    def reserve_positions(self, count: int, device: torch.device) -> None:
        """Makes the rotary table long enough for `count` positions; CUDA graphs keep its address."""
        if count > self._rope.shape[0] or device != self._rope.device:
            self._rope = rope_table(self.config, max(count, self._rope.shape[0]), device)

    def rope(self, positions: Tensor, longest: int = 0) -> Tensor:
        """Rotary entries [T, D] of positions < `longest`, or of reserved ones."""
        if longest:
            self.reserve_positions(longest, positions.device)
        return self._rope[positions]

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """x [T, H] of pairs: embedding of the token at s, hidden state of s - 1."""
        return linear(torch.cat([embedded, hidden.to(embedded.dtype)], dim=-1), self.fc.weight)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """[T, query heads, D], rotated."""
        a = self.layer.self_attn
        q = a.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        if self.config.qk_norm:
            q = rms_norm(q, a.q_norm.weight, self.config.rms_norm_eps)
        return rotate(q, rope)

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [T, kv heads, D]; keys rotated."""
        a, d = self.layer.self_attn, self.config.head_dim
        k, v = a.k_proj(x).unflatten(-1, (-1, d)), a.v_proj(x).unflatten(-1, (-1, d))
        if self.config.qk_norm:
            k = rms_norm(k, a.k_norm.weight, self.config.rms_norm_eps)
        return rotate(k, rope), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output hidden states [T, H] from x and what attention gave, [T, query heads, D]."""
        layer = self.layer
        x = x + layer.self_attn.o_proj(attended.flatten(1))
        h = rms_norm(x, layer.post_attention_layernorm.weight, self.config.rms_norm_eps)
        mixed: Tensor = layer.mlp.down_proj(silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        return x + mixed

    # -- training -------------------------------------------------------------------------------------------

    def unroll(self, embed: Tensor, batch: PairBatch, layout: PairLayout, steps: int) -> list[Tensor]:
        """Drafts `steps` tokens ahead from every base, fed with the true tokens: [N, H] for each step.

        Step 0 reads the policy's hidden states. Step j >= 1 reads the output of step j - 1 at the same base instead,
        and attends to what a draft from there would see: the true pairs up to the base, then its own steps 1 .. j
        (training-time test, EAGLE-3, 2503.01840, section 3.2; HASS, 2408.15766, section 3.2). Entry [n] of step j
        predicts the hidden state at s + j and the token at s + j + 1 for base s = `layout.bases[n]`.
        """
        longest = layout.longest + steps
        embedded = embed[batch.tokens]
        previous = batch.hidden.roll(1, 0)  # a sequence's first token has no pair: nobody sees it
        x = self.join(embedded, previous)
        keys, values = self.keys_values(x, self.rope(layout.positions, longest))
        base_keys, base_values = (
            take(t, layout.keys).transpose(1, 2) for t in (keys, values)
        )  # [B, kv, K, D]
        x, position = x.index_select(0, layout.bases), layout.positions[layout.bases]
        chain: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            rope = self.rope(position + step, longest)
            if step:
                x = self.join(embedded.index_select(0, layout.rows(step)), outputs[-1])
                chain.append(self.keys_values(x, rope))
            attended = attend(self.queries(x, rope), base_keys, base_values, chain, layout)
            outputs.append(self.finish(x, attended))
        return outputs


def check_eagle_tensors(given: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raises CheckpointError that names every missing, unexpected and misshapen tensor of a drafter."""
    check_eagle_shapes({name: tuple(tensor.shape) for name, tensor in given.items()}, config)


def check_eagle_shapes(given: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """As `check_eagle_tensors`, from the shapes alone."""
    wanted = eagle_parameter_shapes(config)
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is not part of the drafter" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {given[name]}, the policy needs {shape}"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    if problems:
        listed = shortened(problems, separator="; ")
        raise CheckpointError(f"the drafter does not fit the policy: {listed}")

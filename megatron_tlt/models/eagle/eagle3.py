"""The EAGLE-3 drafter (2503.01840), which TensorRT-LLM, SGLang and vLLM serve for policies of every family.

    g_s = fc [f_a ; f_b ; f_c]_s                      outputs of three policy layers at s
    r   = g_{s-1},  x_s = [norm(E(token_s)) ; norm(r)]
    r'  = r + attention(x_s),  o_s = r' + mlp(norm(r'))
    logits of the token at s + 1 = lm_head norm(o_s), over the drafter's own vocabulary

Further drafts read o_s in place of g_s. The layer is Llama's whatever the policy is (no bias, no norm of queries and
keys): it is what all three engines have. Names are the ones they read.

Legend: T packed tokens, N bases, H hidden size, D head size, L policy layers, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import refuse_drafter, shape_problems
from megatron_tlt.models.eagle.model import Attention, Mlp, Norm, PairModel
from megatron_tlt.models.torch.layers import rms_norm


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A drafter of `policy`. Build it with `of`, which checks."""

    policy: ModelConfig
    layers: tuple[int, int, int]  # policy layers, from 0, whose outputs (residual stream) are read; ascending
    draft_vocab_size: int

    @classmethod
    def of(
        cls,
        policy: ModelConfig,
        layers: tuple[int, ...] | None = None,
        draft_vocab_size: int | None = None,
    ) -> Eagle3Config:
        """By default the engines' own choice of layers, and the whole vocabulary.

        Raises ConfigError for layers that the engines cannot collect: they collect a layer's input, so the
        last one's output is out of reach.
        """
        chosen = default_layers(policy.num_layers) if layers is None else tuple(layers)
        last = policy.num_layers - 2
        rising = all(a < b for a, b in pairwise(chosen))
        if len(chosen) != 3 or not rising or chosen[0] < 0 or chosen[2] > last:
            raise ConfigError.of(
                "eagle3_layers", list(chosen), f"must be three ascending layers of 0 .. {last}"
            )
        size = policy.vocab_size if draft_vocab_size is None else draft_vocab_size
        if not 1 <= size <= policy.vocab_size:
            raise ConfigError.of("draft_vocab_size", size, f"must be 1 .. {policy.vocab_size}")
        return cls(policy, (chosen[0], chosen[1], chosen[2]), size)

    @property
    def reduced(self) -> bool:
        """Whether the drafter's vocabulary is a part of the policy's (`d2t`, `t2d`)."""
        return self.draft_vocab_size != self.policy.vocab_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor on disk."""
        p, h = self.policy, self.policy.hidden_size
        q, kv, i = p.num_heads * p.head_dim, p.num_kv_heads * p.head_dim, p.intermediate_size
        out: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, 3 * h),
            "midlayer.self_attn.q_proj.weight": (q, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, q),
            "midlayer.mlp.gate_proj.weight": (i, h),
            "midlayer.mlp.up_proj.weight": (i, h),
            "midlayer.mlp.down_proj.weight": (h, i),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
        }
        if self.reduced:
            out |= {"d2t": (self.draft_vocab_size,), "t2d": (p.vocab_size,)}
        return out


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The engines' default for policies of seven layers or more; shorter ones get a spread of what can be collected."""
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    if num_layers < 4:
        raise ConfigError.of(
            "num_hidden_layers", num_layers, "EAGLE-3 reads three layers below the last: 4 or more"
        )
    return 0, num_layers // 2 - 1, num_layers - 2


class Layer3(nn.Module):
    """The layer of EAGLE-3, over embedding and features side by side."""

    def __init__(self, shape: ModelConfig):
        super().__init__()
        h = shape.hidden_size
        self.self_attn, self.mlp = Attention(shape, 2 * h), Mlp(shape)
        self.hidden_norm, self.input_layernorm = Norm(h), Norm(h)
        self.post_attention_layernorm = Norm(h)


class Eagle3Model(PairModel):
    """The EAGLE-3 drafter's weights and arithmetic.

    `unroll`: `batch.hidden` [T, 3H or more] begins with the three layers' outputs.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: Eagle3Config):
        shape = replace(config.policy, qkv_bias=False, qk_norm=False)
        super().__init__(shape)
        self.config = config
        h = config.policy.hidden_size
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = Layer3(shape)
        self.norm = Norm(h)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        size, vocab = config.draft_vocab_size, config.policy.vocab_size
        ids = torch.arange(size) if config.reduced else None
        self.register_buffer("d2t", None if ids is None else torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", None if ids is None else torch.arange(vocab) < size)

    def initialise(self, seed: int, head: Tensor, token_ids: Tensor | None = None) -> None:
        """Random weights; the head starts as the policy's rows (head [V, H]) of the drafter's vocabulary.

        token_ids [Vd]: that vocabulary, for a reduced one (`choose_vocabulary`). fc starts with the identity on
        the highest layer, the closest to the policy's output.
        """
        h = self.config.policy.hidden_size
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 1:
                    p.fill_(1.0)
                else:
                    scale = 0.2 if "o_proj" in name or "down_proj" in name or name == "fc.weight" else 1.0
                    p.copy_(torch.randn(p.shape, generator=generator) * scale * p.shape[1] ** -0.5)
            self.fc.weight[:, 2 * h :] += torch.eye(h, device=self.fc.weight.device)
            if token_ids is not None:
                self.set_vocabulary(token_ids)
            self.lm_head.weight.copy_(head[self.token_ids().to(head.device)])

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Sets the reduced vocabulary: Vd ascending token ids. Raises ConfigError for anything else."""
        size, vocab = self.config.draft_vocab_size, self.config.policy.vocab_size
        ids = token_ids.long().cpu()
        fits = (
            tuple(ids.shape) == (size,)
            and bool((ids.diff() > 0).all())
            and 0 <= int(ids[0]) <= int(ids[-1]) < vocab
        )
        if self.d2t is None or self.t2d is None or not fits:
            given = f"{tuple(ids.shape)} ids"
            raise ConfigError.of(
                "draft vocabulary", given, f"must be {size} ascending ids below {vocab}, of a reduced one"
            )
        self.d2t.copy_(ids - torch.arange(size))
        self.t2d.zero_()[ids] = True

    def token_ids(self) -> Tensor:
        """The policy's ids [Vd] of the drafter's tokens."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids if self.d2t is None else ids + self.d2t

    def load_full(self, named: Mapping[str, Tensor]) -> None:
        """Takes all of `Eagle3Config.shapes`. Raises CheckpointError otherwise."""
        check_eagle3_tensors(named, self.config)
        with torch.no_grad():
            for name, target in self.state_dict(keep_vars=True).items():
                target.copy_(named[name])

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32 [.., Vd] of outputs o [.., H]."""
        normed = rms_norm(outputs, self.norm.weight, self.config.policy.rms_norm_eps)
        return linear(normed, self.lm_head.weight).float()

    def full_logits(self, outputs: Tensor) -> Tensor:
        """Float32 [.., V] of outputs o [.., H]: -inf for tokens outside the drafter's vocabulary."""
        own = self.logits(outputs)
        out = own.new_full((*own.shape[:-1], self.config.policy.vocab_size), float("-inf"))
        out[..., self.token_ids()] = own
        return out

    @property
    def _block(self) -> Layer3:
        return self.midlayer

    def previous(self, hidden: Tensor) -> Tensor:
        """g [T, H] of three layers' outputs [T, 3H or more]."""
        return linear(hidden[:, : 3 * self.config.policy.hidden_size], self.fc.weight)

    def join(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """See `PairModel.join`: [T, 2H]."""
        layer, eps = self.midlayer, self.config.policy.rms_norm_eps
        left = rms_norm(embedded, layer.input_layernorm.weight, eps)
        return torch.cat([left, rms_norm(previous, layer.hidden_norm.weight, eps)], dim=-1)

    def finish(self, x: Tensor, previous: Tensor, attended: Tensor) -> Tensor:
        """See `PairModel.finish`; what was read of the position before is the residual stream."""
        return self._mix(previous, attended)


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens of counts [V], ascending ids [size]; of equals the smaller id."""
    order = counts.argsort(descending=True, stable=True)
    return order[:size].sort().values


def check_eagle3_tensors(given: Mapping[str, Tensor], config: Eagle3Config) -> None:
    """Raises CheckpointError that names every missing, unexpected, misshapen tensor, or a wrong `d2t`."""
    problems = shape_problems({name: tuple(tensor.shape) for name, tensor in given.items()}, config.shapes())
    if not problems and config.reduced:
        problems = _vocabulary_problems(given["d2t"], given["t2d"])
    refuse_drafter(problems)


def _vocabulary_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t and t2d are {d2t.dtype} and {t2d.dtype}, they must be int64 and bool"]
    known = t2d.nonzero().flatten()
    if not torch.equal(torch.arange(len(d2t)) + d2t.cpu(), known.cpu()):
        return ["d2t[i] + i does not name the tokens that t2d marks, in ascending order"]
    return []

"""The block drafter in training: DSpark (2607.05147, section 3), and DFlash (2602.06036) without its Markov head.

    f_s      = norm_f(fc [taps_s])                     a feature a token: keys and values of every layer, at position s
    x        = [E(token_a) ; E(mask) x (B - 1)]        slots of the block at anchor a, at positions a .. a + B - 1
    layers:    a slot attends to the features at s < a and to all slots of its own block
    logits_k = head norm(x_k) + W2 W1[token_(a+k)]     of the token at a + k + 1, k = 0, 1, ..

The embedding E and the head are the policy's, frozen. Without `sample_from_anchor` logits_k read slot k + 1. The Markov
head reads the true token before in training, and the drafted one in rollouts. Outputs carry its row behind the state,
[norm(x_k) ; W1[token]], so one product with [head ; W2] gives the logits.

DFlash 2 (z-lab/dflash, `dflash/model.py`) has DFlash's layers, each sublayer between two convolutions, and in place of
the Markov head a selector among the C largest of head norm(x_k), with the token before as above:
    conv(x)_k = (base_0 + dyn_0) x_k + (base_1 + dyn_1) x_(k-1)         dyn: linear in the sublayer's normed input
    logits_k[c] = head[c] norm(x_k) + <P[token before] * W norm(x_k), Q[c]>
A layer with a window of w attends from slot k at a + k to the features at s > a + k - w only.

Legend: T packed tokens, B sequences, A anchors, S slots of a block, H hidden size, V vocabulary, Vd the drafter's, D
head size, G query heads a kv head, r rank, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from torch.utils.checkpoint import checkpoint

from megatron_tlt.config.block_drafters import CONV_GROUP, NUM_CANDIDATES
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.eagle.model import Attention, Mlp, Norm, gated
from megatron_tlt.drafters.eagle.pairs import PairLayout, PrefixAttention, take
from megatron_tlt.drafters.model import DraftBatch, DrafterModel
from megatron_tlt.models.decoders.torch.layers import rms_norm, rotate


class BlockConvolution(nn.Module):
    """Kernels over a slot and the one before it: a base by channel, and a part that a group of channels shares."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        h = config.policy.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, 2, h))
        self.kernel_projection = nn.Linear(h, 4 * h // CONV_GROUP, bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """[T, 2, 2, H] of a sublayer's normed input [T, H]: for this input, and for the output."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, 2, -1))
        return self.base_kernel + dynamic.repeat_interleave(CONV_GROUP, -1)


class BlockLayer(nn.Module):
    """The weights of a layer."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        h = config.policy.hidden_size
        self.self_attn, self.mlp = Attention(config.layer, h), Mlp(config.layer)
        self.input_layernorm, self.post_attention_layernorm = Norm(h), Norm(h)
        self.attention_conv = BlockConvolution(config) if config.selector_rank else None
        self.mlp_conv = BlockConvolution(config) if config.selector_rank else None


class MarkovHead(nn.Module):
    """A bias of rank r on the logits, from the token before."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.policy.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class CandidateSelector(nn.Module):
    """Scores of rank r of a slot's candidates, from the token before and the slot's state."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        codebook = config.policy.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(codebook))
        self.successor_codebook = nn.Parameter(torch.empty(codebook))
        self.hidden_projection = nn.Linear(config.policy.hidden_size, config.selector_rank, bias=False)

    def context(self, states: Tensor, before: Tensor) -> Tensor:
        """[T, r] of slots' normed states [T, H] and the tokens before them [T]."""
        context: Tensor = embedding(before, self.predecessor_codebook) * self.hidden_projection(states)
        return context

    def scores(self, context: Tensor, candidates: Tensor) -> Tensor:
        """Float32 [.., C] of candidates int64 [.., C] in contexts [.., r]."""
        successors = embedding(candidates, self.successor_codebook)
        return (successors @ context.to(successors.dtype).unsqueeze(-1)).squeeze(-1).float()


class AnchorLayout:
    """Index tensors of chosen bases of a `DraftBatch`, which are the anchors: padded by sequence, for attention."""

    def __init__(self, layout: PairLayout, chosen: np.ndarray, starts: list[int]):
        """`chosen` int [A], ascending: of the layout's N bases."""
        rows = layout.base_rows[chosen]
        owner = np.searchsorted(starts, rows, side="right") - 1
        counts = np.bincount(owner, minlength=len(starts) - 1)
        real = np.arange(counts.max()) < counts[:, None]  # [B, Q]
        order = np.maximum(0, real.ravel().cumsum() - 1)
        places = rows - np.array(starts)[owner]
        self.rows = layout.here(rows)  # [A], of the T
        self.packed = layout.here(np.flatnonzero(real))  # [A], padded -> packed
        self.padded = layout.here(order.reshape(real.shape))  # [B, Q], packed -> padded; padding repeats a real one
        self.visible = layout.here(places[order].reshape(real.shape))  # [B, Q], see `PrefixAttention`


class BlockModel(DrafterModel):
    """The block drafter's weights and arithmetic."""

    config: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        h = config.policy.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * h, h, bias=False)
        self.hidden_norm, self.norm = Norm(h), Norm(h)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.block_layers))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self._shape = config.layer
        self.averaged_positions = config.num_drafted

    def initialise(self, seed: int) -> None:
        """Random weights; fc starts with the identity on the highest layer, Markov head and selector without a bias,
        convolutions as identities.
        """
        self.draw_weights(seed, ("o_proj", "down_proj", "fc.weight"))
        h = self.config.policy.hidden_size
        with torch.no_grad():
            self.fc.weight[:, -h:] += torch.eye(h, device=self.fc.weight.device)
            if self.markov_head is not None:
                self.markov_head.markov_w2.weight.zero_()
            if self.candidate_selector is not None:
                self.candidate_selector.successor_codebook.zero_()
            for conv in (m for m in self.modules() if isinstance(m, BlockConvolution)):
                conv.kernel_projection.weight.zero_()
                conv.base_kernel.zero_()[:, 0] = 1

    def start_from_policy(self, read: Callable[[str], Tensor]) -> None:
        """The final norm becomes the policy's, behind which its LM head reads. Its layers gain nothing as a start."""
        with torch.no_grad():
            self.norm.weight.copy_(read("model.norm.weight"))

    def linears(self) -> list[tuple[nn.Module, str, nn.Linear]]:
        """The layers', not `fc` and the Markov head's."""
        parents = [part for layer in self.blocks for part in (layer.self_attn, layer.mlp)]
        return [(p, n, m) for p in parents for n, m in p.named_children() if isinstance(m, nn.Linear)]

    # -- parts, which rollouts use as well

    @property
    def blocks(self) -> list[BlockLayer]:
        """`layers`, with their type."""
        return list(self.layers)  # type: ignore[arg-type]

    def features(self, states: Tensor) -> Tensor:
        """[T, H] of the policy's states [T, W], which begin with the layers that are read."""
        taps = linear(states[:, : self.fc.in_features], self.fc.weight)
        return self._normed(taps, self.hidden_norm)

    def block_tokens(self, anchors: Tensor) -> Tensor:
        """[A S]: of each block the anchor's token, of `anchors` int64 [A], then the mask."""
        ids = anchors.new_full((len(anchors), self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = anchors
        return ids.flatten()

    def queries(self, layer: BlockLayer, x: Tensor, rope: Tensor) -> Tensor:
        """[T, query heads, D], rotated."""
        attention = layer.self_attn
        q = attention.q_proj(x).unflatten(-1, (-1, self._shape.head_dim))
        return rotate(self._normed(q, attention.q_norm) if self._shape.qk_norm else q, rope)

    def keys_values(self, layer: BlockLayer, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [T, kv heads, D] of features or normed slots; keys rotated."""
        attention, d = layer.self_attn, self._shape.head_dim
        k, v = attention.k_proj(x).unflatten(-1, (-1, d)), attention.v_proj(x).unflatten(-1, (-1, d))
        return rotate(self._normed(k, attention.k_norm) if self._shape.qk_norm else k, rope), v

    def enter(self, x: Tensor, conv: BlockConvolution | None) -> tuple[Tensor, Tensor | None]:
        """Normed slots `x` as a sublayer reads them, and the kernel of `leave`, where there are convolutions."""
        if conv is None:
            return x, None
        own, of_output = conv.kernels(x).unbind(1)
        return self._convolved(x, own), of_output

    def leave(self, out: Tensor, kernel: Tensor | None) -> Tensor:
        """What a sublayer that gave `out` adds to the slots."""
        return out if kernel is None else self._convolved(out, kernel)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x [A S, H] with kernels [A S, 2, H]; a block's first slot has none before it."""
        before = pad(x.view(-1, self.config.block_size, x.shape[1])[:, :-1], (0, 0, 1, 0))
        return kernel[:, 0] * x + kernel[:, 1] * before.view_as(x)

    def finish(self, layer: BlockLayer, x: Tensor, attended: Tensor, kernel: Tensor | None) -> Tensor:
        """Slots [T, H] behind the layer, whose attention gave `attended` [T, query heads, D]; `kernel`: its own."""
        x, mlp = x + self.leave(layer.self_attn.o_proj(attended.flatten(1)), kernel), layer.mlp
        y, kernel = self.enter(self._normed(x, layer.post_attention_layernorm), layer.mlp_conv)
        # computed again on the way back: its inside is the widest activation of all
        wide = checkpoint(gated, mlp.gate_proj(y), mlp.up_proj(y), use_reentrant=False, preserve_rng_state=False)
        return x + self.leave(mlp.down_proj(wide), kernel)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, self._shape.rms_norm_eps)

    # -- training

    def unroll(self, embed: Tensor, batch: DraftBatch, layout: PairLayout, steps: int) -> list[Tensor]:
        """Outputs [N, H + r] with every base as an anchor. Positions behind the block repeat
        its last slot.
        """
        slots = self.fill(embed, batch, layout, np.arange(len(layout.base_rows)))
        return [self.output(batch.tokens, layout.rows(k), slots, k) for k in range(steps)]

    def output(self, tokens: Tensor, before: Tensor, slots: Tensor, k: int) -> Tensor:
        """Outputs [A, H + r] of drafted position `k`, from `slots` [A, S, H] of `fill`; `before` [A] are the rows of
        `tokens` [T] that precede the drafted ones. The selector's part has no gradient in the slots.
        """
        state = slots[:, min(k, self.config.num_drafted - 1) + self.config.first_slot]
        if self.markov_head is not None:
            more = self.markov_head.markov_w1(tokens.index_select(0, before))
        elif self.candidate_selector is not None:
            more = self.candidate_selector.context(state.detach(), tokens.index_select(0, before))
        else:
            return state
        return torch.cat([state, more.to(state.dtype)], dim=-1)

    def fill(self, embed: Tensor, batch: DraftBatch, layout: PairLayout, chosen: np.ndarray) -> Tensor:
        """The blocks at the chosen bases [A], behind the final norm: [A, S, H]."""
        anchors, slots = AnchorLayout(layout, chosen, batch.starts), self.config.block_size
        dtype, h = next(self.parameters()).dtype, self.config.policy.hidden_size
        longest = layout.longest + slots
        features = self.features(batch.hidden.to(dtype))
        far_rope = self.rope(layout.positions, longest)
        places = layout.positions[anchors.rows][:, None] + torch.arange(slots, device=batch.tokens.device)
        rope = self.rope(places.flatten(), longest)
        x = embed[self.block_tokens(batch.tokens.index_select(0, anchors.rows))].to(dtype)
        for layer, window in zip(self.blocks, self.config.layer_windows, strict=True):
            # A sequence's place p holds the feature of p - 1: the anchor's own state does not exist yet.
            far = [t.roll(1, 0) for t in self.keys_values(layer, features, far_rope)]
            y, kernel = self.enter(self._normed(x, layer.input_layernorm), layer.attention_conv)
            query, near = self.queries(layer, y, rope), self.keys_values(layer, y, rope)
            attended = _attend(query, near, [take(t, layout.keys) for t in far], anchors, slots, window)
            x = self.finish(layer, x, attended, kernel)
        return self._normed(x, self.norm).view(-1, slots, h)

    def logits(self, outputs: Tensor, head: Tensor | None = None) -> Tensor:
        """Of outputs [.., H + r]."""
        assert head is not None
        if (ids := self.token_ids()) is not None:
            head = head.index_select(0, ids)
        h = self.config.policy.hidden_size
        logits = linear(outputs[..., :h], head)
        if self.markov_head is not None:
            logits = logits + self.markov_head.markov_w2(outputs[..., h:])
        if self.candidate_selector is not None:
            best, ids = logits.topk(NUM_CANDIDATES)
            chosen = best + self.candidate_selector.scores(outputs[..., h:], ids).to(best.dtype)
            logits = torch.full_like(logits, float("-inf")).scatter(-1, ids, chosen)
        return logits


def _attend(
    q: Tensor, near: tuple[Tensor, Tensor], far: list[Tensor], anchors: AnchorLayout, slots: int, window: int
) -> Tensor:
    """q [A S, Hq, D] over the features before the anchor (`far`, keys and values [B, K, Hkv, D], place p of p - 1) that
    are less than `window` positions behind the slot (0: all), and the slots of its own block (`near`, [A S, Hkv, D])
    -> [A S, Hq, D].
    """
    heads, d = q.shape[1:]
    kv, (b, wide) = near[0].shape[1], anchors.padded.shape
    group = heads // kv
    q = (q * d**-0.5).view(-1, slots, kv, group, d)  # [A, S, kv, G, D]
    keys, values = (t.transpose(1, 2) for t in far)
    # All slots of a block see the same features: they are so many more query heads of one query.
    query = take(q, anchors.padded).permute(0, 3, 2, 4, 1, 5).flatten(2, 3)  # [B, kv, S G, Q, D]
    # Of slot k's window k + 1 positions are the block's.
    reach = (window - 1 - torch.arange(slots, device=q.device)).repeat_interleave(group) if window else None
    prefix = query, keys, values, anchors.visible, keys.shape[2], reach
    out, norm = PrefixAttention.apply(*prefix)  # type: ignore[no-untyped-call]
    flat = out.permute(0, 3, 1, 2, 4).reshape(b * wide, kv, slots * group, d)
    seen = flat.index_select(0, anchors.packed)  # [A, kv, S G, D]
    weight = norm.permute(0, 3, 1, 2).reshape(b * wide, kv, slots * group).index_select(0, anchors.packed)
    own_keys, own_values = (t.view(-1, slots, kv, d).transpose(1, 2) for t in near)  # [A, kv, S, D]
    own = (q.permute(0, 2, 1, 3, 4).flatten(2, 3) @ own_keys.transpose(2, 3)).float()  # [A, kv, S G, S]
    shares = torch.cat([weight.unsqueeze(-1), own], dim=-1).softmax(-1).to(q.dtype)
    mixed = shares[..., :1] * seen + shares[..., 1:] @ own_values
    return mixed.unflatten(2, (slots, group)).permute(0, 2, 1, 3, 4).reshape(-1, heads, d)

"""Running rows for a trained drafter, and what it must compute, pair by pair or block by block, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_tlt.config.block_drafters import BlockShape
from megatron_tlt.drafters.decoder import BUCKET_WIDTH, BUCKETS, POSITIONS, DrafterDecoder, DraftingRows, Pairs
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.models.decoders.base import KVCache
from megatron_tlt.models.decoders.draft import Draft
from megatron_tlt.models.decoders.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.decoders.keys import row_keys
from megatron_tlt.models.decoders.torch.layers import rope_table
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.tiny_drafters import catching_up

ONES = np.ones((POSITIONS, BUCKETS), np.float32)


def states(count: int, config: DrafterConfig, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    width = (len(config.aux_layers) + 1) * config.policy.hidden_size
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rows:
    """Running rows over shuffled blocks: `tokens[i]` [n] and hidden states `states[i]` [n - 1 or more] of row i.

    The last token is the one to draft behind; all but the first are outputs. Nothing is cached yet.
    """

    def __init__(
        self,
        drafter: DrafterDecoder,
        tokens: list[list[int]],
        states: list[Tensor],
        *,
        temperature: float | list[float] = 1.0,
        catch_up: int = 700,
        room: int = 32,
        block_size: int = 16,
        seed: int = 0,
    ):
        count, longest = len(tokens), max(map(len, tokens))
        each, size = -(-(longest + room) // block_size), block_size
        random = np.random.default_rng(seed)
        self.drafter, self.tokens, self.size = drafter, tokens, size
        self.kv: KVCache = drafter.new_kv_cache(count * each, size)
        self.tables = random.permutation(count * each).reshape(count, each).astype(np.int32)
        width = len(states[0][0])
        self.pages = torch.full((count * each * size, width), float("nan"), dtype=drafter.dtype)
        for row, state in enumerate(states):
            self.pages[self.slots(row, np.arange(len(state)))] = state.to(drafter.dtype)
        slot = random.permutation(count).astype(np.int32)
        self.outputs = np.zeros((count, longest), np.int32)
        for row, ids in enumerate(tokens):
            self.outputs[slot[row], : len(ids) - 1] = ids[1:]
        lengths = np.array([len(ids) - 1 for ids in tokens], np.int32)
        keys = np.random.default_rng(3).integers(0, 1 << 63, count, dtype=np.uint64)
        heat = np.broadcast_to(np.float32(temperature), count).copy()
        synced, first = np.zeros(count, np.int32), np.ones(count, np.int32)
        self.rows = DraftingRows(slot, lengths, lengths.copy(), self.tables, self.outputs, keys, heat, synced, first)
        with catching_up(catch_up):
            self.drafts = drafter.row_drafter(self.kv, self.rows, self.pages)

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        return self.tables[row, positions // self.size] * self.size + positions % self.size

    def feed(self, row: int, start: int, end: int) -> None:
        """Caches the pairs of positions start .. end - 1."""
        at = np.arange(start, end)
        columns = (np.array(self.tokens[row])[at], at, self.slots(row, at), self.slots(row, at - 1))
        self.drafter.feed(Pairs(*(c.astype(np.int32) for c in columns)), self.pages, self.kv)
        self.rows.synced[self.rows.slot[row]] = end - 1

    def draft(self, wanted: int | list[int], rates: np.ndarray = ONES, min_acceptance: float = 0.0) -> Draft:
        most = np.broadcast_to(np.asarray(wanted, np.int32), len(self.tokens)).copy()
        return self.drafts.draft(most, rates, min_acceptance)


def of_row(drafted: Draft, row: int) -> Draft:
    """The part of one row."""
    end = int(drafted.counts[: row + 1].sum())
    at = slice(end - int(drafted.counts[row]), end)
    names = ("tokens", "cumulative_acceptance", "feature")
    return Draft(drafted.counts[row : row + 1], *(getattr(drafted, name)[at] for name in names))


def rows_of(drafter: DrafterDecoder, lengths: list[int], **more) -> Rows:
    """Row i has the same content whatever the other rows are."""
    generators = [torch.Generator().manual_seed(n) for n in lengths]
    tokens = [torch.randint(0, 70, (n,), generator=g).tolist() for n, g in zip(lengths, generators, strict=True)]
    return Rows(drafter, tokens, [states(n - 1, drafter.config, n) for n in lengths], **more)


def noted_waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the methods of tensors that bring a value to the host, in the order of their calls from now on."""
    waits: list[str] = []
    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        method = getattr(torch.Tensor, name)
        noted = lambda self, *a, method=method, name=name: (waits.append(name), method(self, *a))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, noted)
    return waits


def check_tokens(
    drafted: Draft, rows: Rows, row: int, logits: Callable[[int, int], Tensor], rates: np.ndarray, atol: float
) -> None:
    """A row's draft has, token by token, the largest of logits / T + the noise of its position. `logits` [V] of a step
    behind a token; their gaps are right within `atol`.
    """
    own, r, before = of_row(drafted, row), rows.rows, rows.tokens[row][-1]
    acceptance, t = np.float32(1), float(r.temperature[row])
    for step, token in enumerate(own.tokens.tolist()):
        scores = logits(step, before)
        if t > 0:
            key = row_keys(r.keys[row : row + 1], r.output_len[row : row + 1] + step)
            scores = scores / t + gumbel_noise(key_tensor(key), len(scores))[0]
        best = scores.topk(2)
        assert token == int(best.indices[0]), step
        gap = float(best.values[0] - best.values[1])
        position, bucket = divmod(int(own.feature[step]), BUCKETS)
        near = {min(BUCKETS - 1, int((gap + d) // BUCKET_WIDTH)) for d in (-atol, 0, atol)}
        assert position == min(step, POSITIONS - 1) and bucket in near
        acceptance *= rates[position, bucket]
        np.testing.assert_allclose(own.cumulative_acceptance[step], acceptance, rtol=1e-6)
        before = token


def check_row(
    drafted: Draft,
    rows: Rows,
    row: int,
    policy: list[tuple[str, Tensor]],
    drafter: list[tuple[str, Tensor]],
    rates: np.ndarray = ONES,
    atol: float = 2e-4,
) -> None:
    """A row's draft is what `expected` and the sampler's noise give, token by token."""
    first = int(rows.rows.first[rows.rows.slot[row]])
    tokens = rows.tokens[row][first:-1]
    states = rows.pages[rows.slots(row, np.arange(first - 1, len(rows.tokens[row]) - 1))].float()
    if rows.drafter.config.kind == "eagle3":
        fc = dict(drafter)["fc.weight"]
        states = states[:, : fc.shape[1]] @ fc.T
    fed = [states]

    def logits(step: int, before: int) -> Tensor:
        tokens.append(before)
        found, hidden = expected(rows.drafter.config, policy, drafter, tokens, torch.cat(fed), first)
        fed.append(hidden[-1:])
        return found[-1]

    check_tokens(drafted, rows, row, logits, rates, atol)


def check_block(
    drafted: Draft, rows: Rows, row: int, policy: list, drafter: Mapping[str, Tensor], rates: np.ndarray = ONES
) -> None:
    """The same of a block drafter, by `expected_slots` and `expected_logits`."""
    p, config, place = dict(policy), rows.drafter.config, len(rows.tokens[row]) - 1
    embed, first = p["model.embed_tokens.weight"], int(rows.rows.first[rows.rows.slot[row]]) - 1
    seen = rows.pages[rows.slots(row, np.arange(place))].float()
    slots = expected_slots(config, embed, drafter, rows.tokens[row][-1], seen, first)
    head = p.get("lm_head.weight", embed)
    logits = partial(expected_logits, config, head, drafter, slots)
    check_tokens(drafted, rows, row, logits, rates, 1e-3)


def expected(
    config: DrafterConfig,
    policy: list[tuple[str, Tensor]],
    drafter: list[tuple[str, Tensor]],
    tokens: list[int],
    hidden: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and outputs [n, H] of n pairs at positions first, first + 1, ..., which see each other."""
    p, e, layer = dict(policy), dict(drafter), config.layer
    n, d, eps, is_eagle = len(tokens), layer.head_dim, layer.rms_norm_eps, config.kind == "eagle"
    at = "layer." if is_eagle else "midlayer."

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * e[f"{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        bias = e.get(f"{at}self_attn.{name}_proj.bias", torch.zeros(()))
        return (x @ e[f"{at}self_attn.{name}_proj.weight"].T + bias).view(n, -1, d).transpose(0, 1)

    def turn(x: Tensor) -> Tensor:
        cos, sin = rope_table(layer, first + n)[first:].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    embedded = p["model.embed_tokens.weight"][tokens]
    if is_eagle:
        fed = x = torch.cat([embedded, hidden], -1) @ e["fc.weight"].T + e.get("fc.bias", 0.0)
    else:
        normed = norm(hidden, at + "hidden_norm")
        fed = torch.cat([norm(embedded, at + "input_layernorm"), normed], -1)
        x = normed if config.norm_before_residual else hidden
    q, k, v = (project(fed, name) for name in "qkv")
    if layer.qk_norm:
        q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
    group = layer.num_heads // layer.num_kv_heads
    k, v = turn(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = turn(q) @ k.transpose(1, 2) / d**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    x = x + out @ e[f"{at}self_attn.o_proj.weight"].T + e.get(f"{at}self_attn.o_proj.bias", 0.0)
    y = norm(x, at + "post_attention_layernorm")
    gate, up = (y @ e[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (silu(gate) * up) @ e[f"{at}mlp.down_proj.weight"].T
    ids = torch.arange(config.draft_vocab_size) + e.get("d2t", torch.zeros(()).long())
    if is_eagle:
        own = x @ p.get("lm_head.weight", p["model.embed_tokens.weight"])[ids].T
    else:
        own = norm(x, "norm") @ e["lm_head.weight"].T
    logits = torch.full((n, config.policy.vocab_size), float("-inf"))
    logits[:, ids] = own
    return logits, x


def block_config(policy: ModelConfig, vocab: int | None = None, layer: ModelConfig | None = None, **more):
    """A drafter of two layers that reads the outputs of three, of rank 12, whose mask is token 7."""
    sizes = {"layers": 2, "aux_layers": (0, 2, 5), "block_size": 6, "markov_rank": 12, "mask_token_id": 7}
    return BlockConfig.of(policy, BlockShape(**(sizes | {"sample_from_anchor": True} | more)), vocab, layer)


DFLASH2 = {"sample_from_anchor": False, "markov_rank": 0, "selector_rank": 12, "windows": (9, 0)}


def convolved(x: Tensor, drafter: Mapping[str, Tensor], at: str, side: int, read: Tensor) -> Tensor:
    """DFlash 2's convolution of a block's x [B, H], slot by slot; its kernels follow the sublayer's input `read`."""
    kernels = (read @ drafter[f"{at}.kernel_projection.weight"].T).view(len(x), 2, 2, -1)[:, side]
    base, group = drafter[f"{at}.base_kernel"][side], torch.arange(x.shape[1]) // 16
    out = [(base[0] + kernels[k, 0][group]) * x[k] for k in range(len(x))]
    return torch.stack([y + (base[1] + kernels[k, 1][group]) * x[k - 1] if k else y for k, y in enumerate(out)])


def expected_slots(
    config: BlockConfig, embed: Tensor, drafter: Mapping[str, Tensor], anchor: int, states: Tensor, first: int = 0
) -> Tensor:
    """Outputs [B, H] behind the final norm of the block behind `states` [a, W], whose anchor is token `anchor` at a.

    Positions before `first` are not seen.
    """
    e, layer, place = drafter, config.layer, len(states)
    d, eps = layer.head_dim, layer.rms_norm_eps
    table = rope_table(layer, place + config.block_size)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * e[f"{name}.weight"]

    def heads(x: Tensor, at: str, name: str, begin: int) -> Tensor:
        y = x @ e[f"{at}.{name}_proj.weight"].T + e.get(f"{at}.{name}_proj.bias", torch.zeros(()))
        y = y.view(len(x), -1, d).transpose(0, 1)
        if name != "v":
            y = norm(y, f"{at}.{name}_norm") if layer.qk_norm else y
            cos, sin = table[begin : begin + len(x)].chunk(2, -1)
            a, b = y.chunk(2, -1)
            y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return y

    features = norm(states[first:, : e["fc.weight"].shape[1]] @ e["fc.weight"].T, "hidden_norm")
    x = embed[[anchor] + [config.mask_token_id] * (config.block_size - 1)]
    for j in range(config.block_layers):
        at = f"layers.{j}.self_attn"
        y = read = norm(x, f"layers.{j}.input_layernorm")
        if config.selector_rank:
            y = convolved(read, e, f"layers.{j}.attention_conv", 0, read)
        k, v = (torch.cat([heads(features, at, n, first), heads(y, at, n, place)], 1) for n in "kv")
        group = layer.num_heads // layer.num_kv_heads
        scores = heads(y, at, "q", place) @ k.repeat_interleave(group, 0).transpose(1, 2) / d**0.5
        for i in range(len(x)):
            behind = max(0, place + i - config.layer_windows[j] + 1 - first) if config.layer_windows[j] else 0
            scores[:, i, :behind] = float("-inf")
        out = (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(len(x), -1)
        out = out @ e[f"{at}.o_proj.weight"].T
        x = x + (convolved(out, e, f"layers.{j}.attention_conv", 1, read) if config.selector_rank else out)
        y = read = norm(x, f"layers.{j}.post_attention_layernorm")
        if config.selector_rank:
            y = convolved(read, e, f"layers.{j}.mlp_conv", 0, read)
        gate, up = (y @ e[f"layers.{j}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = (silu(gate) * up) @ e[f"layers.{j}.mlp.down_proj.weight"].T
        x = x + (convolved(out, e, f"layers.{j}.mlp_conv", 1, read) if config.selector_rank else out)
    return norm(x, "norm")


def expected_logits(
    config: BlockConfig, head: Tensor, drafter: Mapping[str, Tensor], slots: Tensor, k: int, before: int
) -> Tensor:
    """Logits [V] of drafted position `k` behind token `before`, of `expected_slots`."""
    ids = torch.arange(config.draft_vocab_size) + drafter.get("d2t", torch.zeros(()).long())
    state = slots[k if config.sample_from_anchor else k + 1]
    own = head[ids] @ state
    if config.markov_rank:
        own = own + drafter["markov_head.markov_w2.weight"] @ drafter["markov_head.markov_w1.weight"][before]
    logits = torch.full((config.policy.vocab_size,), float("-inf"))
    if config.selector_rank:
        selector = {name: drafter[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")}
        context = selector["predecessor"][before] * (drafter["candidate_selector.hidden_projection.weight"] @ state)
        for c in own.topk(16).indices.tolist():
            logits[c] = own[c] + context @ selector["successor"][c]
        return logits
    logits[ids] = own
    return logits

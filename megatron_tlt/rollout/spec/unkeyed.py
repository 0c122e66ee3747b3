"""Verification without shared noise, from logits: block verification of chains, recursive rejection of trees.

The answers have the policy's distribution but are not those of plain decoding (coupled verification's are). Draws:
acceptance uniforms from `noise.accept_uniforms`, the last token of a row from the plain noise of its output position
(so a row without a draft emits plain decoding's token); drafters must draw with `noise.draft_keys`.

Legend: B rows (requests), N drafted nodes, T = B + N fed rows, E emitted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.distributed.tensor_parallel import TensorParallel
from megatron_tlt.rollout.sampler import Sampler, SamplingRows
from megatron_tlt.rollout.spec.block import (
    ChainDraft,
    accepted_lengths,
    block_rule,
    drafter_distribution,
    emitted_rows,
    residuals,
)
from megatron_tlt.rollout.spec.draft import Draft
from megatron_tlt.rollout.spec.noise import accept_uniforms
from megatron_tlt.rollout.spec.recursive import walk_tree
from megatron_tlt.rollout.spec.verify import Accepted, Layout

_ELEMENTS_AT_ONCE = 1 << 23  # of [fed rows, V]: bounds the float64 temporaries


@dataclass(slots=True)
class _Verdict:
    """Which fed rows are emitted, and what the last token of each batch row is drawn from."""

    emitted: np.ndarray  # bool [T]
    last: np.ndarray  # int64 [B], the fed row whose next token is a row's last one
    rejected: np.ndarray  # int64 [R], batch rows where that token comes from a residual, not from P
    residual: Tensor  # float64 [R, V], not normalized


def unkeyed(
    logits: Tensor, rows: SamplingRows, draft: Draft, sampler: Sampler, tp: TensorParallel
) -> tuple[Accepted, np.ndarray, np.ndarray]:
    """Verifies `draft` by `logits` float32 [T, V]: chains by blocks, trees by recursive rejection.

    `rows` says how each of the T fed rows is sampled; its keys are the plain row keys of their output positions
    (siblings share one). `draft.probs` None: the candidates were certain, or are taken to be. Temperature and masks
    make P as they make plain sampling's; at temperature 0 a token is accepted if and only if it is the arg max.
    Returns the verdict, the emitted tokens int32 and their log-probabilities float32 (before masks).
    """
    layout = Layout.of(draft)
    uniforms = accept_uniforms(rows.keys[layout.starts], draft.counts)
    parts = [
        _verify_part(logits[fed], part, rows.part(fed), uniforms[nodes], sampler)
        for part, fed, nodes in _parts(draft, logits.shape[1])
    ]
    emitted, tokens, logprobs = (
        np.concatenate(p) if len(parts) > 1 else p[0] for p in zip(*parts, strict=True)
    )
    if tp.size > 1:  # ranks may round differently: rank 0 decides
        mine = np.stack((emitted.astype(np.int32), tokens, logprobs.view(np.int32)))
        ours = tp.broadcast(torch.from_numpy(mine).to(logits.device)).cpu().numpy()
        emitted, tokens, logprobs = ours[0] > 0, ours[1], ours[2].view(np.float32)
    accepted = layout.accepted(emitted)
    return accepted, tokens[accepted.index], logprobs[accepted.index]


def policy_distribution(logits: Tensor, rows: SamplingRows) -> Tensor:
    """What plain sampling draws from: float64 [T, V] of `logits` float32 [T, V]; one-hot at temperature 0."""
    allowed = _scores(logits, rows)
    at = np.flatnonzero(rows.masked)
    if len(at):
        index = torch.from_numpy(at).to(logits.device)
        allowed = allowed.index_copy(0, index, rows.part(at).apply_masks(allowed[index]))
    probs = allowed.double().softmax(-1)
    greedy = np.flatnonzero(rows.temperature == 0)
    if len(greedy):
        index = torch.from_numpy(greedy).to(logits.device)
        best = logits[index].argmax(-1, keepdim=True)
        probs[index] = torch.zeros_like(probs[index]).scatter_(1, best, 1.0)
    return probs


def _scores(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits / (T or 1), in fp32 as the sampler has it."""
    temperature = torch.from_numpy(rows.temperature).to(logits.device).unsqueeze(1)
    return logits.float() / torch.where(temperature > 0, temperature, 1.0)


def _verify_part(
    logits: Tensor, draft: Draft, rows: SamplingRows, uniforms: np.ndarray, sampler: Sampler
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every fed row: bool [T] is it emitted, and if so int32 [T] its next token and float32 [T] log-probability."""
    verify: Callable[[Tensor, Draft, np.ndarray], _Verdict]
    verify = _verify_chains if draft.parents is None else _verify_trees
    verdict = verify(policy_distribution(logits, rows), draft, uniforms)
    layout = Layout.of(draft)
    accepted = verdict.emitted[layout.nodes]
    tokens, logprobs = np.zeros(len(logits), np.int32), np.zeros(len(logits), np.float32)
    tokens[layout.parents[accepted]] = draft.tokens[accepted]
    tokens[verdict.last] = _draw_last(logits, rows, verdict, sampler)
    at = np.flatnonzero(verdict.emitted)
    index = torch.from_numpy(at).to(logits.device)
    drawn = torch.from_numpy(tokens[at].astype(np.int64)).to(logits.device)[:, None]
    # The scores of the emitted rows again: keeping those of all rows would cost more.
    scores = _scores(logits[index], rows.part(at)).log_softmax(-1)
    logprobs[at] = scores.gather(1, drawn)[:, 0].cpu().numpy()
    return verdict.emitted, tokens, logprobs


def _verify_chains(policy: Tensor, draft: Draft, uniforms: np.ndarray) -> _Verdict:
    chain = ChainDraft.of(draft, policy)
    rule = block_rule(chain)
    lengths = accepted_lengths(chain, rule, uniforms)
    rejected = np.flatnonzero(lengths < chain.counts)
    residual = residuals(chain, rule, rejected, lengths)
    return _Verdict(emitted_rows(chain, lengths), chain.layout.starts + lengths, rejected, residual)


def _verify_trees(policy: Tensor, draft: Draft, uniforms: np.ndarray) -> _Verdict:
    """Row by row on the host: few nodes of a tree are ever visited."""
    assert draft.parents is not None
    q = drafter_distribution(draft, policy)
    p, q_host = policy.cpu().numpy(), None if q is None else q.cpu().numpy()
    layout = Layout.of(draft)
    emitted = np.zeros(len(p), bool)
    last = layout.starts.copy()
    rejected, rests = [], []
    for row, (start, count) in enumerate(zip(layout.starts.tolist(), draft.counts.tolist(), strict=True)):
        nodes = slice(start - row, start - row + count)
        path, rest = walk_tree(
            p[start : start + count + 1],
            None if q_host is None else q_host[nodes],
            draft.tokens[nodes],
            draft.parents[nodes],
            uniforms[nodes],
        )
        fed = [start, *(start + 1 + node for node in path)]
        emitted[fed] = True
        last[row] = fed[-1]
        if rest is not None:
            rejected.append(row)
            rests.append(rest)
    residual = np.stack(rests) if rests else np.empty((0, p.shape[1]))
    at = np.array(rejected, np.int64)
    return _Verdict(emitted, last, at, torch.from_numpy(residual).to(policy.device))


def _draw_last(logits: Tensor, rows: SamplingRows, verdict: _Verdict, sampler: Sampler) -> np.ndarray:
    """The last token int32 [B] of each row, with the plain noise of its position."""
    last = rows.part(verdict.last)
    scores = logits[torch.from_numpy(verdict.last).to(logits.device)].float()
    # A greedy row's residual is the arg max as well: it stays as it is.
    drawn = verdict.rejected[last.temperature[verdict.rejected] > 0]
    if len(drawn):
        keep = torch.from_numpy(last.temperature[verdict.rejected] > 0).to(logits.device)
        scores[torch.from_numpy(drawn).to(logits.device)] = verdict.residual[keep].log().float()
        # The residual has temperature and masks in it.
        last.temperature[drawn], last.top_k[drawn] = 1.0, 0
        last.top_p[drawn], last.min_p[drawn] = 1.0, 0.0
        last.is_masked = bool(last.masked.any())
    tokens: np.ndarray = sampler.sample(scores, last)[0].cpu().numpy()
    return tokens


def _parts(draft: Draft, vocab: int) -> Iterator[tuple[Draft, slice, slice]]:
    """`draft` in groups of rows of bounded size, each with its fed rows and its nodes."""
    ends = np.cumsum(draft.counts + 1)
    row = 0
    while row < len(ends):
        begin = int(ends[row - 1]) if row else 0
        stop = int(np.searchsorted(ends, begin + max(1, _ELEMENTS_AT_ONCE // vocab), side="right"))
        stop = max(stop, row + 1)
        nodes = slice(begin - row, int(ends[stop - 1]) - stop)
        yield _rows_of(draft, slice(row, stop), nodes), slice(begin, int(ends[stop - 1])), nodes
        row = stop


def _rows_of(draft: Draft, rows: slice, nodes: slice) -> Draft:
    return Draft(
        draft.counts[rows],
        draft.tokens[nodes],
        draft.cumulative_acceptance[nodes],
        draft.depths[nodes],
        None if draft.parents is None else draft.parents[nodes],
        probs=None if draft.probs is None else draft.probs[nodes],
    )

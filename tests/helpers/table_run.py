"""Many requests decoded at once by a policy that is a table of logits: plainly, or with drafts and a verifier.

Contexts are numbered as in `enumerate_spec`. Keys, ragged batches and samplers are the engine's own.
Legend: V vocabulary, R requests, B rows of a step, T fed rows, N nodes, G longest draft of a step, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.keys import request_key, row_keys
from megatron_tlt.rollout.sampler import Sampler, SamplingRows, gumbel_noise
from megatron_tlt.rollout.spec.draft import Draft
from tests.helpers.enumerate_spec import child

# Logits [T, V], rows, draft and sampler to tokens that each row emits [B] and the tokens, flat.
Verify = Callable[[Tensor, SamplingRows, Draft, Sampler], tuple[np.ndarray, np.ndarray]]
# Request keys [B] and output positions [B] at which a step begins to the keys that the drafter uses.
Stream = Callable[[np.ndarray, np.ndarray], np.ndarray]
# How many tokens each of so many rows drafts.
Lengths = Callable[[np.random.Generator, int], np.ndarray]


class TableRun:
    """Decodes `length` tokens for many requests whose logits are a table of contexts; V, drafts and steps are free."""

    def __init__(self, policy: np.ndarray, drafter: np.ndarray, length: int, seed: int, count: int):
        self.policy, self.drafter = (torch.from_numpy(t.astype(np.float32)) for t in (policy, drafter))
        self.length, self.vocab = length, policy.shape[1]
        base = np.array([request_key(seed, p, 0) for p in range(1 << 10)], np.uint64)
        self.keys = row_keys(np.resize(base, count), np.arange(count) // len(base) + 1000)
        self.temperature, self.top_k, self.top_p, self.min_p = 1.0, 0, 1.0, 0.0
        self.sampler = Sampler(torch.device("cpu"))
        self.steps = self.accepted = 0  # row steps, and drafted tokens accepted in them

    def sampling(self, keys: np.ndarray) -> SamplingRows:
        """How rows with these row keys are sampled."""
        n = len(keys)
        return SamplingRows(
            keys,
            np.full(n, self.temperature, np.float32),
            np.full(n, self.top_k, np.int32),
            np.full(n, self.top_p, np.float64),
            np.full(n, self.min_p, np.float32),
            is_masked=self.top_k > 0 or self.top_p < 1 or self.min_p > 0,
        )

    def plain(self) -> np.ndarray:
        """Answers int [R, length] of plain keyed decoding."""
        context, tokens = np.zeros(len(self.keys), np.int64), []
        for t in range(self.length):
            rows = self.sampling(row_keys(self.keys, np.full(len(self.keys), t)))
            tokens.append(self.sampler.sample(self.policy[context], rows)[0].numpy())
            context = child(context, tokens[-1], self.vocab)
        return np.stack(tokens, 1)

    def speculative(self, verify: Verify, stream: Stream, lengths: Lengths, topk: int = 1) -> np.ndarray:
        """Answers int32 [R, length]. A row's draft is a chain with `topk - 1` siblings beside each token, as leaves."""
        count, rng = len(self.keys), np.random.default_rng(0)
        out, done, context = (
            np.zeros((count, self.length), np.int32),
            np.zeros(count, int),
            np.zeros(count, int),
        )
        while len(active := np.flatnonzero(done < self.length)):
            begin, requests = done[active], self.keys[active]
            g = np.minimum(lengths(rng, len(active)), self.length - begin - 1)
            draft, fed = self.draft(context[active], g, stream(requests, begin), begin, topk)
            row = np.arange(len(active)).repeat(draft.counts + 1)
            depth = np.zeros(len(fed), int)
            depth[np.arange(draft.num_nodes) + np.arange(len(active)).repeat(draft.counts) + 1] = draft.depths
            rows = self.sampling(row_keys(requests[row], begin[row] + depth))
            counts, tokens = verify(self.policy[fed], rows, draft, self.sampler)
            place = np.arange(len(tokens)) - (np.cumsum(counts) - counts).repeat(counts)
            out[active.repeat(counts), begin.repeat(counts) + place] = tokens
            done[active] += counts
            for step in range(int(counts.max())):
                more = active[counts > step]
                context[more] = child(context[more], out[more, begin[counts > step] + step], self.vocab)
            self.steps += len(active)
            self.accepted += int(counts.sum()) - len(active)
        return out

    def draft(
        self, context: np.ndarray, g: np.ndarray, keys: np.ndarray, begin: np.ndarray, topk: int
    ) -> tuple[Draft, np.ndarray]:
        """Chains of `g` int [B] tokens, the drafter's perturbed best, and the contexts [T] of what is fed."""
        along, candidates = [context], []
        for d in range(max(1, int(g.max()))):
            logits = self.drafter[along[-1]] / (self.temperature or 1.0)
            noise = gumbel_noise(torch.from_numpy(row_keys(keys, begin + d).view(np.int64)), self.vocab)
            candidates.append((logits + (noise if self.temperature else 0)).topk(topk, -1).indices.numpy())
            ahead = child(along[-1], candidates[-1][:, 0], self.vocab)
            along.append(np.where(d + 1 < g, ahead, 0))  # 0 where nothing will be fed

        # Columns are K times the depths 1 .. G: the trunk, then its siblings.
        depth = np.tile(np.arange(1, len(along)), topk)
        is_node = depth <= g[:, None]
        tokens = np.stack(candidates, 1).transpose(0, 2, 1).reshape(len(context), -1)
        before = np.concatenate([np.stack(along[:-1], 1)] * topk, 1)
        fed = np.concatenate([context[:, None], child(before, tokens, self.vocab)], 1)
        is_fed = np.concatenate([np.ones((len(context), 1), bool), is_node], 1)
        depths = np.broadcast_to(depth, is_node.shape)[is_node].astype(np.int32)
        draft = Draft(
            is_node.sum(1).astype(np.int32),
            tokens[is_node].astype(np.int32),
            np.ones(len(depths), np.float32),
            depths,
            None if topk == 1 else (depths - 2).astype(np.int32),  # both hang on the trunk's node above
        )
        return draft, fed[is_fed]

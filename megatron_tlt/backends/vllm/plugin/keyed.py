"""Keyed sampling and coupled verification in vLLM's model runner, with the embedded engine's own sampler.

    logits [T, V]  ->  token of row i at output position t:  argmax(logits / T + G(key_i, t))   rollout/sampler.py
    drafts         ->  accepted while they equal these tokens; the next token is the bonus      coupled verification

so an answer is a function of seed, prompt and policy: of no batch, drafter or draft length (docs/numerics.md). vLLM's
own `seed` gives a request a generator: its answers survive another batch, but not another drafter.

Legend: B requests of a step, T rows of logits, V vocabulary, K longest draft.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.backends.vllm.plugin import internals
from megatron_tlt.backends.vllm.plugin.suffix import SuffixBridge
from megatron_tlt.models.factory import sample_kernel
from megatron_tlt.models.keys import row_keys
from megatron_tlt.models.native.build import find_compiler
from megatron_tlt.models.native.decoder import keyed_sample
from megatron_tlt.rollout.sampler import NativeSample, Sampler, SamplingRows

ARGUMENT = "tlt"  # in `SamplingParams.extra_args`: [key, temperature, top_k, top_p, min_p, prompt id]
Arguments = tuple[int, float, int, float, float, int]


class DraftCounts:
    """Drafted and accepted tokens since the last `take`, by draft position."""

    def __init__(self) -> None:
        self._drafted = np.zeros(0, np.int64)
        self._accepted = np.zeros(0, np.int64)
        self.rows = self.emitted = self.steps = self.draft_steps = 0

    def add(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """One step: drafted and accepted tokens of each row, int [B]."""
        self.steps += 1
        rows = drafted > 0
        if not rows.any():
            return
        self.draft_steps += 1
        longest = int(drafted.max())
        if longest > len(self._drafted):
            self._drafted = np.pad(self._drafted, (0, longest - len(self._drafted)))
            self._accepted = np.pad(self._accepted, (0, longest - len(self._accepted)))
        at = np.arange(longest)
        self._drafted[:longest] += (at < drafted[rows, None]).sum(0)
        self._accepted[:longest] += (at < accepted[rows, None]).sum(0)
        self.rows += int(rows.sum())
        self.emitted += int(accepted[rows].sum()) + int(rows.sum())

    def take(self) -> dict[str, Any]:
        """The counts as plain data. Resets them."""
        counts = {
            "steps": self.steps,
            "draft_steps": self.draft_steps,
            "rows": self.rows,
            "emitted": self.emitted,
            "drafted_at": self._drafted.tolist(),
            "accepted_at": self._accepted.tolist(),
        }
        self.__init__()  # type: ignore[misc]
        return counts


class KeyedSampling:
    """Samples for one model runner, and perturbs what its drafter proposes."""

    def __init__(self, runner: Any, suffix: SuffixBridge | None = None):
        """Replaces the runner's sampler and its drafter's. `suffix` drafts beside the drafter, or in its place."""
        self._runner, self._device, self._suffix = runner, torch.device(runner.device), suffix
        kernel = sample_kernel("auto", self._device)
        self._sampler = Sampler(self._device, _native_sample(self._device), kernel=kernel)
        self.counts = DraftCounts()
        self._arguments: dict[str, Arguments] = {}
        # For the proposal after a sample: the requests, positions of their next tokens, and tokens proposed.
        self._next: tuple[SamplingRows, np.ndarray]
        self._proposed = 0
        internals.replace_sampler(runner, self._sample)
        has_logits = internals.replace_draft_sampler(
            runner, self._begin_proposal, self._sample_draft, self._improve
        )
        if suffix is not None and not has_logits:
            runner.drafter.source = suffix.propose_lists

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._arguments.pop(request, None)
        if self._suffix is not None:
            self._suffix.finish(request)

    def _arguments_of(self, request: str) -> Arguments:
        found = self._arguments.get(request)
        if found is None:
            given = internals.extra_args(self._runner, request)[ARGUMENT]
            found = self._arguments[request] = tuple(given)
        return found

    def _sample(self, logits: Tensor, metadata: Any) -> Any:
        """logits [T, V]: of each request one row, or one for each drafted token and a bonus row after them."""
        names = internals.request_ids(self._runner)
        arguments = [self._arguments_of(request) for request in names]
        count = len(arguments)
        drafted, draft_tokens = (
            (np.zeros(count, np.int64), np.zeros(0, np.int64))
            if metadata is None
            else internals.drafts(metadata)
        )
        done = internals.output_lengths(self._runner)
        rows = drafted + 1
        owner = np.repeat(np.arange(count), rows)
        starts = np.cumsum(rows) - rows
        within = np.arange(len(owner)) - starts[owner]
        sampling = _rows(arguments)
        tokens = self._draw(logits, sampling.part(owner), done[owner] + within).cpu().numpy()
        out, accepted = follow(tokens, starts, drafted, draft_tokens)
        self.counts.add(drafted, accepted)
        self._next = (sampling, done + accepted + 1)
        if self._suffix is not None:
            is_drawn = internals.is_drawn(self._runner)
            self._suffix.note(names, self._prompt_of, arguments, done, drafted, accepted, out, is_drawn)
        return internals.sampler_output(torch.from_numpy(out).to(self._device))

    def _prompt_of(self, request: str) -> tuple[list[int], int]:
        """A request's prompt, and the id that its siblings share."""
        return internals.prompt_tokens(self._runner, request), self._arguments_of(request)[-1]

    def _improve(self, proposed: Tensor) -> Tensor:
        """EAGLE's drafts, or the suffix drafter's where those are worth more."""
        if self._suffix is None or proposed.shape[1] == 0:
            return proposed
        return self._suffix.improve(internals.request_ids(self._runner), proposed)

    def _begin_proposal(self) -> None:
        self._proposed = 0

    def _sample_draft(self, logits: Tensor) -> Tensor:
        """The next drafted token of each request, int64 [B]: the noise of the position that it stands for."""
        sampling, first = self._next
        part = sampling.part(slice(None))
        part.is_masked = False
        self._proposed += 1
        return self._draw(logits, part, first + self._proposed - 1).long()

    def _draw(self, logits: Tensor, rows: SamplingRows, positions: np.ndarray) -> Tensor:
        """Tokens int32 [R] of logits [R, V] with the noise of these output positions. Mutates `rows`."""
        rows.keys = row_keys(rows.keys, positions)
        return self._sampler.sample(logits.float().contiguous(), rows)[0]


def follow(
    tokens: np.ndarray, starts: np.ndarray, drafted: np.ndarray, draft_tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Coupled verification of chains.

    tokens int [T]: the policy's keyed token behind each fed token; `starts` [B]: each request's first row;
    `drafted` [B] and `draft_tokens` [sum]: its draft. Returns tokens int32 [B, K + 1], -1 behind the last, and
    accepted drafts int [B].
    """
    width = int(drafted.max(initial=0)) + 1
    at = np.arange(width)
    exists = at <= drafted[:, None]
    drawn = tokens[np.where(exists, starts[:, None] + at, 0)]
    firsts = np.cumsum(drafted) - drafted
    is_draft = at[:-1] < drafted[:, None]
    padded = np.append(draft_tokens, -1)
    proposed = padded[np.where(is_draft, firsts[:, None] + at[:-1], len(draft_tokens))]
    accepted = (is_draft & (drawn[:, :-1] == proposed)).cumprod(axis=1).sum(axis=1)
    out = np.where(at <= accepted[:, None], drawn, -1).astype(np.int32)
    return out, accepted


def _native_sample(device: torch.device) -> NativeSample | None:
    """The sampler in C, on CPUs with a compiler: the same draws in a tenth of PyTorch's time."""
    if device.type != "cpu" or find_compiler() is None:
        return None
    return partial(keyed_sample, threads=torch.get_num_threads())


def _rows(arguments: list[Arguments]) -> SamplingRows:
    """One row a request, with the request's key."""
    keys, temperature, top_k, top_p, min_p, _ = zip(*arguments, strict=True)
    rows = SamplingRows(
        np.array(keys, np.uint64),
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float64),
        np.array(min_p, np.float32),
        is_masked=True,
    )
    rows.is_masked = bool(rows.masked.any())
    return rows

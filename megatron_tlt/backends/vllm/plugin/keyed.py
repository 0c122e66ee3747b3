"""Keyed sampling and coupled verification in vLLM's model runner, with the embedded engine's own sampler.

    logits [T, V]  ->  token of row i at response position t:  argmax(logits / T + G(key_i, t))   rollout/sampler.py
    drafts         ->  accepted while they equal these tokens; the next token is the bonus      coupled verification

so a response is a function of seed, prompt and policy: of no batch, drafter or draft length
(docs/design/numerics.md). vLLM's own `seed` gives a request a generator: its responses survive another batch,
but not another drafter.

Legend: B requests of a step, T rows of logits, V vocabulary, K longest draft.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.backends.drafting import StepDrafting, chains
from megatron_tlt.backends.token_drafts import Began
from megatron_tlt.backends.vllm.plugin import compat
from megatron_tlt.config.planning.engine import FP32_AT_ONCE
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.factory import sample_kernel
from megatron_tlt.models.decoders.keys import row_keys
from megatron_tlt.models.decoders.native.abi import library
from megatron_tlt.models.decoders.native.decoder import keyed_sample
from megatron_tlt.models.decoders.torch.transfer import upload
from megatron_tlt.rollout.sampler import NativeSample, Sampler, SamplingRows
from megatron_tlt.rollout.speculation.verify import accept_matches

_log = logging.getLogger(__name__)

# In `SamplingParams.extra_args`: [key, temperature, top_k, top_p, min_p, prompt id, start]. The last `start` tokens of
# the request's prompt are its response's earlier turns: positions count on from there. Under `PRE_ROLLED`: the response
# that an earlier policy drew with the same key, from its first token on.
ARGUMENT, PRE_ROLLED = "tlt", "tlt_pre_rolled"
Arguments = tuple[int, float, int, float, float, int, int]


class KeyedSampling:
    """Samples for one model runner, and perturbs what its drafter proposes."""

    def __init__(self, runner: Any, drafting: StepDrafting | None = None):
        """Replaces the runner's sampler and its drafter's, which drafts as `drafting` says."""
        self._runner, self._device, self._drafting = runner, torch.device(runner.device), drafting
        kernel = sample_kernel("auto", self._device)
        self._sampler = Sampler(self._device, _native_sample(self._device), kernel=kernel)
        self._steps = 0
        self._arguments: dict[str, Arguments] = {}
        self._names: list[str] = []  # of the batch that `_batch` was made of
        self._batch = _rows([])
        self._starts = np.zeros(0, np.int64)
        # For the proposal after a sample: positions of the requests' next tokens, and tokens proposed.
        self._next = np.zeros(0, np.int64)
        self._proposed = 0
        compat.replace_sampler(runner, self._sample)
        if drafting is None:
            return
        has_logits = compat.replace_draft_sampler(runner, self._begin_proposal, self._sample_draft, drafting.end)
        if not has_logits:
            runner.drafter.source = drafting.propose_lists

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._arguments.pop(request, None)
        if self._drafting is not None and self._drafting.tokens is not None:
            self._drafting.tokens.finish(request)

    def take_stats(self) -> dict[str, Any]:
        """Steps, and the fields of `SpeculationStats`, since the last call. Resets them."""
        steps, self._steps = self._steps, 0
        return {"steps": steps, "speculation": {} if self._drafting is None else self._drafting.take_stats()}

    def _arguments_of(self, request: str) -> Arguments:
        found = self._arguments.get(request)
        if found is None:
            given = compat.extra_args(self._runner, request)[ARGUMENT]
            found = self._arguments[request] = tuple(given)
        return found

    def _sample(self, logits: Tensor, metadata: Any) -> Any:
        """logits [T, V]: of each request one row, or one for each drafted token and a bonus row after them."""
        names = compat.request_ids(self._runner)
        if names != self._names:  # how rows are sampled changes with the batch only
            arguments = [self._arguments_of(request) for request in names]
            self._names, self._batch = names, _rows(arguments)
            self._starts = np.array([start for *_, start in arguments], np.int64)
        done = self._starts + compat.output_lengths(self._runner)
        self._steps += 1
        count = len(names)
        if metadata is None:
            drafted = accepted = np.zeros(count, np.int64)
            out = self._draw(logits, self._batch.part(slice(None)), done)[:, None]
            chosen = None
        else:
            drafted, draft_tokens = compat.drafts(metadata)
            rows = drafted + 1
            owner, starts = np.repeat(np.arange(count), rows), np.cumsum(rows) - rows
            within = np.arange(len(owner)) - starts[owner]
            drawn = self._draw(logits, self._batch.part(owner), done[owner] + within)
            both = torch.cat([drawn, draft_tokens]).cpu().numpy()  # the step's one wait for the device
            chosen, accepted = follow(both[: len(owner)], drafted, both[len(owner) :])
            out = upload(chosen, self._device)
        self._next = done + accepted + 1
        if self._drafting is not None:
            self._record(self._drafting, out if chosen is None else chosen, drafted, accepted, done)
        return compat.sampler_output(out)

    def _record(
        self,
        drafting: StepDrafting,
        out: Tensor | np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        done: np.ndarray,
    ) -> None:
        is_drawn, was_pre_rolled = compat.is_drawn(self._runner), None
        if drafting.tokens is not None:
            tokens = out if isinstance(out, np.ndarray) else out.cpu().numpy()
            batch = self._names, self._began, self._batch.keys, self._batch.temperature
            was_pre_rolled = drafting.tokens.note(*batch, done, drafted, accepted, tokens, is_drawn)
        fed = int(compat.row_starts(self._runner)[-1])
        is_decode = bool(is_drawn.all()) and fed == len(drafted) + int(drafted.sum())
        drafting.record(drafted, accepted, is_drawn, is_decode, was_pre_rolled)

    def _began(self, request: str) -> Began:
        *_, prompt_id, start = self._arguments_of(request)
        tokens = compat.prompt_tokens(self._runner, request)
        end, limit = len(tokens) - start, start + compat.max_tokens(self._runner, request)
        pre_rolled = compat.extra_args(self._runner, request).get(PRE_ROLLED, [])
        return Began(tokens[:end], tokens[end:], prompt_id, limit, pre_rolled)

    def _begin_proposal(self) -> int:
        assert self._drafting is not None
        self._proposed = 0
        return self._drafting.begin()

    def _sample_draft(self, logits: Tensor) -> Tensor:
        """The next drafted token of each request, int64 [B]: the noise of the position that it stands for."""
        part = self._batch.part(slice(None))
        part.is_masked = False
        self._proposed += 1
        return self._draw(logits, part, self._next + self._proposed - 1).long()

    def _draw(self, logits: Tensor, rows: SamplingRows, positions: np.ndarray) -> Tensor:
        """Tokens int32 [R] of logits [R, V] with the noise of these response positions, drawn in chunks of rows:
        copies in fp32 take at most `FP32_AT_ONCE` elements. Mutates `rows`.
        """
        rows.keys = row_keys(rows.keys, positions)
        step = max(1, FP32_AT_ONCE // logits.shape[1])
        parts = [slice(at, at + step) for at in range(0, max(1, len(logits)), step)]
        drawn = [self._sampler.sample(logits[part].float().contiguous(), rows.part(part))[0] for part in parts]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def follow(drawn: np.ndarray, drafted: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coupled verification of chains: the tokens emitted, int32 [B, K + 1] with -1 behind the last, and how many
    drafted ones were accepted, int [B].

    `drawn` int [T]: the policy's keyed token behind each fed token; `drafted` int [B], `tokens` int [sum]: the drafts.
    """
    accepted = accept_matches(drawn, chains(drafted, tokens))
    width = drafted.max() + 1
    chosen = np.full((len(drafted), width), -1, np.int32)
    chosen[np.arange(width) < accepted.counts[:, None]] = drawn[accepted.index]
    return chosen, accepted.counts - 1


def _native_sample(device: torch.device) -> NativeSample | None:
    """The sampler in C, on CPUs whose compiler builds it: the same draws in a tenth of PyTorch's time."""
    if device.type != "cpu":
        return None
    try:
        library()
    except BackendError as error:
        _log.warning("PyTorch draws the tokens, slower: %s", str(error).partition("\n")[0])
        return None
    return partial(keyed_sample, threads=torch.get_num_threads())


def _rows(arguments: list[Arguments]) -> SamplingRows:
    """One row a request, with the request's key."""
    keys, temperature, top_k, top_p, min_p, *_ = zip(*arguments, strict=True) if arguments else [()] * 5
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

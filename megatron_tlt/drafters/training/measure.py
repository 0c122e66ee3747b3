"""How well a drafter drafts, from finished responses alone: no engine runs.

A coupled draft from a base matches the policy exactly while the drafter's perturbed arg max is the response's own
token; up to there the draft has read the response's tokens. So one unrolled pass over the responses gives the
accepted length of a draft at every base.

Legend: J drafted positions, R rows, T tokens of a batch, V vocabulary, Vd the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.model import DrafterModel
from megatron_tlt.drafters.training.batching import DraftSequence, collate, group_by_length, windows
from megatron_tlt.models.decoders.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.decoders.keys import row_keys

_MAX_ELEMENTS = 1 << 23  # of [R, V] at a time: bounds the temporaries
_COLUMNS = ("rows", "overlap", "reached", "matched")


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Sums by drafted position over rows: rows that exist, their 1 - TV, rows whose earlier drafts all matched, and
    those of them that matched, too. Sums of several ranks add.
    """

    sums: np.ndarray  # float64 [J, 4]
    bases: int = 0

    @classmethod
    def empty(cls, steps: int) -> MeasuredAcceptance:
        """Nothing measured yet."""
        return cls(np.zeros((steps, len(_COLUMNS))))

    def __add__(self, other: MeasuredAcceptance) -> MeasuredAcceptance:
        return MeasuredAcceptance(self.sums + other.sums, self.bases + other.bases)

    def _share(self, column: str, of: str) -> list[float]:
        part, whole = (self.sums[:, _COLUMNS.index(name)] for name in (column, of))
        return [float(a / b) if b else 0.0 for a, b in zip(part, whole, strict=True)]

    @property
    def overlap(self) -> list[float]:
        """1 - TV by drafted position: the acceptance of ideal verification of a single draft."""
        return self._share("overlap", "rows")

    @property
    def coupled(self) -> list[float]:
        """Share of drafted tokens that are the policy's, where all earlier ones were."""
        return self._share("matched", "reached")

    @property
    def accepted_length(self) -> float:
        """Drafted tokens that are accepted in a row, mean over bases; a response's end cuts drafts short."""
        return float(self.sums[:, _COLUMNS.index("matched")].sum() / self.bases) if self.bases else 0.0

    def to_json(self) -> dict[str, Any]:
        """Rates by drafted position."""
        return {
            "bases": self.bases,
            "overlap": self.overlap,
            "coupled": self.coupled,
            "accepted_length": self.accepted_length,
        }

    def table(self) -> str:
        """The same for people."""
        lines = ["position   1-TV   coupled"]
        for i, (overlap, coupled) in enumerate(zip(self.overlap, self.coupled, strict=True), 1):
            lines.append(f"{i:8d}  {overlap:.3f}     {coupled:.3f}")
        lines.append(f"expected accepted length {self.accepted_length:.2f} of {len(self.sums)} drafted")
        return "\n".join(lines)


@torch.no_grad()
def measure(
    model: DrafterModel,
    embed: Tensor,
    head: Tensor,
    sequences: Sequence[DraftSequence],
    *,
    steps: int,
    temperature: float,
    batch_tokens: int,
    window: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> MeasuredAcceptance:
    """Accepted lengths of drafts of `steps` tokens on these responses, sampled with their `key`s at `temperature`.

    Distributions are compared at `temperature` (1 if that is 0). embed and head [V, H] on the model's device. The last
    H columns of the sequences' hidden states are the policy's final ones. `on_progress` is called with (batches done,
    batches in all).
    """
    head = head.float()
    ids = model.token_ids()
    policy_head = head if ids is None else head[ids]
    own = _Vocabulary(torch.arange(len(head), device=head.device) if ids is None else ids, policy_head)
    draft = partial(model.logits, head=head)
    sums, bases = MeasuredAcceptance.empty(steps).sums, 0
    parts = [part for s in sequences if s.num_bases for part in windows(s, window)]
    groups = group_by_length(parts, batch_tokens)
    for number, group in enumerate(groups):
        if on_progress is not None:
            on_progress(number, len(groups))
        batch = collate(group, head.device)
        layout = PairLayout(batch)
        owner = np.searchsorted(batch.starts, layout.bases.cpu().numpy(), side="right") - 1
        keys = np.array([s.key for s in group], np.uint64)[owner]
        response = np.array([s.response_start for s in group], np.int64)[owner]
        # The position in the response of the first drafted token.
        first = layout.positions[layout.bases].cpu().numpy() - response + 1
        alive = torch.ones(len(layout.bases), dtype=torch.bool, device=head.device)
        bases += sum(s.num_bases for s in group)
        final = batch.hidden[:, -head.shape[1] :].float()
        used = torch.cat([layout.rows(step) for step in range(steps)]).unique()
        normalisers = final.new_zeros(len(final))
        normalisers[used] = _log_normalisers(final[used], head, temperature or 1.0)
        for step, output in enumerate(model.unroll(embed, batch, layout, steps)):
            alive &= layout.valid(step)
            noise_keys = key_tensor(row_keys(keys, first + step), head.device)
            places, valid = layout.rows(step), layout.valid(step)
            rows = output, noise_keys, final[places], normalisers[places], batch.tokens[places + 1], valid
            values, matched = _compare(rows, draft, own, temperature)
            sums[step, :2] += values
            sums[step, 2] += float(alive.sum())
            alive &= matched
            sums[step, 3] += float(alive.sum())
    return MeasuredAcceptance(sums, bases)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The drafter's tokens."""

    ids: Tensor  # int64 [Vd]
    policy_head: Tensor  # float32 [Vd, H], their rows of the policy's LM head


def _log_normalisers(states: Tensor, head: Tensor, t: float) -> Tensor:
    """Log of the softmax's denominator [R] over all tokens at temperature t, of final states [R, H]."""
    size = max(1, _MAX_ELEMENTS // head.shape[0])
    return torch.cat([(rows @ head.T / t).logsumexp(-1) for rows in states.split(size)])


def _compare(
    rows: tuple[Tensor, ...], draft: Callable[[Tensor], Tensor], own: _Vocabulary, temperature: float
) -> tuple[np.ndarray, Tensor]:
    """Sums of `_COLUMNS[:2]` over the rows that exist; bool [R]: rows whose draft is the response's token.

    `rows`: the drafter's outputs [R, W] at one position, keys of their noise int64 [R], the policy's states [R, H] at
    the same place, their `_log_normalisers` [R], the response's tokens [R], and whether rows have this position, bool
    [R]. `draft`: outputs -> logits [R, Vd].
    """
    sums, matches, t = np.zeros(2), [], temperature or 1.0
    size = max(1, _MAX_ELEMENTS // len(own.ids))
    columns = (column.split(size) for column in rows)
    for output, keys, state, normaliser, token, valid in zip(*columns, strict=True):
        q = draft(output.float()).float() / t
        p = (state @ own.policy_head.T / t - normaliser[:, None]).exp()
        score = q + gumbel_noise(keys, own.ids) if temperature else q
        matches.append((own.ids[score.argmax(-1)] == token) & valid)
        overlap = torch.minimum(p, q.softmax(-1)).sum(-1)
        sums += (torch.stack([torch.ones_like(overlap), overlap]) * valid).double().sum(1).cpu().numpy()
    return sums, torch.cat(matches)

"""How well a drafter drafts, from finished responses alone: no engine runs.

A coupled draft from a base matches the policy exactly while the drafter's perturbed arg max is the response's own
token; up to there the draft has read the response's tokens. So one unrolled pass over the responses gives the
accepted length of a draft at every base.

Legend: J drafted positions, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafter.batching import DraftSequence, collate, group_by_length, windows
from megatron_tlt.models.drafters import DraftBatch, DrafterModel
from megatron_tlt.models.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.keys import row_keys

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
    drafted = partial(model.full_logits, head=head.float())
    sums, bases = MeasuredAcceptance.empty(steps).sums, 0
    parts = [part for s in sequences if s.num_bases for part in windows(s, window)]
    groups = group_by_length(parts, batch_tokens)
    for number, group in enumerate(groups):
        if on_progress is not None:
            on_progress(number, len(groups))
        batch = collate(group, head.device)
        layout = model.layout(batch)
        owner = np.searchsorted(batch.starts, layout.bases.cpu().numpy(), side="right") - 1
        keys = np.array([s.key for s in group], np.uint64)[owner]
        response = np.array([s.response_start for s in group], np.int64)[owner]
        # The position in the response of the first drafted token.
        first = layout.positions[layout.bases].cpu().numpy() - response + 1
        alive = torch.ones(len(layout.bases), dtype=torch.bool, device=head.device)
        bases += sum(s.num_bases for s in group)
        for step, output in enumerate(model.unroll(embed, batch, layout, steps)):
            alive &= layout.valid(step)
            noise_keys = key_tensor(row_keys(keys, first + step), head.device)
            rows = output, noise_keys, layout.rows(step), layout.valid(step)
            values, matched = _compare(rows, batch, drafted, head, temperature)
            sums[step, :2] += values
            sums[step, 2] += float(alive.sum())
            alive &= matched
            sums[step, 3] += float(alive.sum())
    return MeasuredAcceptance(sums, bases)


def _compare(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    batch: DraftBatch,
    drafted: Callable[[Tensor], Tensor],
    head: Tensor,
    temperature: float,
) -> tuple[np.ndarray, Tensor]:
    """Sums of `_COLUMNS[:2]` over the rows that exist; bool [R]: rows whose draft is the response's token.

    `rows`: the drafter's outputs [R, H] at one position, keys of their noise int64 [R], rows of the batch that predict
    the drafted token [R], and whether they have this position, bool [R].
    """
    sums, matches, t = np.zeros(2), [], temperature or 1.0
    size = max(1, _MAX_ELEMENTS // head.shape[0])
    for output, keys, places, valid in zip(*(column.split(size) for column in rows), strict=True):
        q = drafted(output.float()) / t
        p = (batch.hidden[places, -head.shape[1] :].float() @ head.float().T / t).softmax(-1)
        score = q + gumbel_noise(keys, head.shape[0]) if temperature else q
        matches.append((score.argmax(-1) == batch.tokens[places + 1]) & valid)
        overlap = torch.minimum(p, q.softmax(-1)).sum(-1)
        sums += (torch.stack([torch.ones_like(overlap), overlap]) * valid).double().sum(1).cpu().numpy()
    return sums, torch.cat(matches)

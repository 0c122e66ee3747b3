"""How well a drafter drafts, from finished answers alone: no engine runs.

A coupled draft from a base matches the policy exactly while the drafter's perturbed arg max is the answer's own
token; up to there the draft has read the answer's tokens. So one unrolled pass over the answers gives, for every base,
what a draft there would have been worth.

Legend: J drafted positions, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_tlt.drafter.batching import DraftSequence, collate, pack, windows
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairBatch, PairLayout
from megatron_tlt.models.keyed_noise import gumbel_noise, key_tensor
from megatron_tlt.models.keys import row_keys

_ELEMENTS_AT_ONCE = 1 << 23  # of [R, V]: bounds the temporaries
_COLUMNS = ("rows", "overlap", "top1", "top4", "reached", "matched")


@dataclass(slots=True)
class Acceptance:
    """Sums by drafted position over rows: rows that exist, their 1 - TV, the policy's probability of the
    drafter's most likely token and of its four most likely ones, rows whose earlier drafts all matched, and those
    of them that matched, too. Plain sums: those of several ranks add.
    """

    sums: np.ndarray  # float64 [J, 6]
    bases: int = 0

    @classmethod
    def empty(cls, steps: int) -> Acceptance:
        """Nothing measured yet."""
        return cls(np.zeros((steps, len(_COLUMNS))))

    def add(self, other: Acceptance) -> None:
        """Takes another's sums in."""
        self.sums = self.sums + other.sums
        self.bases += other.bases

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
        """Drafted tokens that are accepted in a row, mean over bases; an answer's end cuts drafts short."""
        return float(self.sums[:, _COLUMNS.index("matched")].sum() / self.bases) if self.bases else 0.0

    def to_json(self) -> dict[str, Any]:
        """Rates by drafted position."""
        return {
            "bases": self.bases,
            "overlap": self.overlap,
            "coupled": self.coupled,
            "p_argmax_q": self._share("top1", "rows"),
            "p_top4_q": self._share("top4", "rows"),
            "accepted_length": self.accepted_length,
        }

    def table(self) -> str:
        """The same for people."""
        lines = ["position   1-TV   coupled   p(argmax q)   p(top-4 q)"]
        top1, top4 = self._share("top1", "rows"), self._share("top4", "rows")
        for i, row in enumerate(zip(self.overlap, self.coupled, top1, top4, strict=True), 1):
            lines.append("{:8d}  {:.3f}     {:.3f}         {:.3f}        {:.3f}".format(i, *row))
        lines.append(f"expected accepted length {self.accepted_length:.2f} of {len(self.sums)} drafted")
        return "\n".join(lines)


@torch.no_grad()
def measure(
    model: EagleModel | Eagle3Model,
    embed: Tensor,
    head: Tensor,
    sequences: Sequence[DraftSequence],
    *,
    steps: int,
    temperature: float,
    batch_tokens: int,
    window: int,
) -> Acceptance:
    """What drafts of `steps` tokens would be worth on these answers, sampled with their `key`s at `temperature`.

    Distributions are compared at `temperature` (1 if that is 0). embed and head [V, H] on the model's device. The last
    H columns of the sequences' hidden states are the policy's final ones.
    """
    drafted = model.full_logits if isinstance(model, Eagle3Model) else partial(linear, weight=head.float())
    result = Acceptance.empty(steps)
    pieces = [piece for s in sequences if s.num_bases for piece in windows(s, window)]
    for group in pack(pieces, batch_tokens):
        batch = collate(group, head.device)
        layout = PairLayout(batch)
        owner = np.repeat(np.arange(len(group)), [s.num_bases for s in group])
        keys = np.array([s.key for s in group], np.uint64)[owner]
        answer = np.array([s.answer_start for s in group], np.int64)[owner]
        position = (
            layout.positions[layout.bases].cpu().numpy() - answer + 1
        )  # output position of the first draft
        alive = torch.ones(len(layout.bases), dtype=torch.bool, device=head.device)
        result.bases += len(alive)
        for step, output in enumerate(model.unroll(embed, batch, layout, steps)):
            noise_keys = row_keys(keys, position + step)
            alive &= layout.valid(step)
            matched = _compare(
                result.sums[step], output, drafted, batch, layout, step, head, temperature, noise_keys, alive
            )
            alive &= matched
    return result


def _compare(
    sums: np.ndarray,
    output: Tensor,
    drafted: Callable[[Tensor], Tensor],
    batch: PairBatch,
    layout: PairLayout,
    step: int,
    head: Tensor,
    temperature: float,
    keys: np.ndarray,
    alive: Tensor,
) -> Tensor:
    """Adds one drafted position of one batch to `sums` [6]; bool [N]: rows whose draft is the answer's token."""
    rows, valid = layout.rows(step), layout.valid(step)
    matched = torch.zeros_like(alive)
    size = max(1, _ELEMENTS_AT_ONCE // head.shape[0])
    for a, b in pairwise([*range(0, len(rows), size), len(rows)]):
        part, real = rows[a:b], valid[a:b]
        q = drafted(output[a:b].float()) / (temperature or 1.0)
        p = (batch.hidden[part, -head.shape[1] :].float() @ head.float().T / (temperature or 1.0)).softmax(-1)
        score = q + gumbel_noise(key_tensor(keys[a:b], head.device), head.shape[0]) if temperature else q
        matched[a:b] = (score.argmax(-1) == batch.tokens[part + 1]) & real
        q = q.softmax(-1)
        best = q.topk(min(4, q.shape[-1]), dim=-1).indices
        likely = p.gather(1, best)
        values = torch.stack(
            [torch.ones_like(likely[:, 0]), torch.minimum(p, q).sum(-1), likely[:, 0], likely.sum(-1)]
        )
        sums[:4] += (values * real).double().sum(1).cpu().numpy()
    sums[4] += float(alive.sum())
    sums[5] += float((alive & matched).sum())
    return matched

"""A drafter's proposal: a few tokens in a row for each running request. Numpy only.

Legend: B running rows, N drafted tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Draft:
    """Drafted tokens of B rows, flat in row order: the i-th token of a row follows its (i - 1)-th.

    `cumulative_acceptance[i]` estimates the probability that the policy emits token i (it and all before it in its row
    match), so it never grows along a row.
    """

    counts: np.ndarray  # int32 [B], tokens of each row
    tokens: np.ndarray  # int32 [N]
    cumulative_acceptance: np.ndarray  # float32 [N]
    feature: np.ndarray | None = None  # int32 [N], cell of the drafter's calibration table

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.tokens)

    @property
    def row_of(self) -> np.ndarray:
        """The row of each token, int64 [N]."""
        return np.arange(len(self.counts)).repeat(self.counts)

    @property
    def positions(self) -> np.ndarray:
        """The place of each token in its row's draft, int64 [N], from 0."""
        return np.arange(self.num_tokens) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    @classmethod
    def empty(cls, rows: int) -> Draft:
        """No token for any row."""
        none = np.empty(0, np.int32)
        return cls(np.zeros(rows, np.int32), none, np.empty(0, np.float32), none)

    def select(self, keep: np.ndarray) -> Draft:
        """The tokens where `keep` (bool [N]) holds: of each row its first ones, or none."""
        if keep.all():
            return self
        return Draft(
            np.bincount(self.row_of[keep], minlength=len(self.counts)).astype(np.int32),
            self.tokens[keep],
            self.cumulative_acceptance[keep],
            None if self.feature is None else self.feature[keep],
        )

    def join(self, other: Draft) -> Draft:
        """This draft and the `other` one, of other rows of the same B."""
        if not other.num_tokens:
            return self
        order = np.concatenate((self.row_of, other.row_of)).argsort(kind="stable")
        columns = zip(self._columns(), other._columns(), strict=True)
        return Draft(self.counts + other.counts, *(np.concatenate(pair)[order] for pair in columns))

    def _columns(self) -> tuple[np.ndarray, ...]:
        """Tokens, acceptance and feature; 0 of a drafter without one."""
        feature = np.zeros(self.num_tokens, np.int32) if self.feature is None else self.feature
        return self.tokens, self.cumulative_acceptance, feature

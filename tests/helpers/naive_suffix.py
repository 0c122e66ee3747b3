"""The suffix drafter in plain Python, from its description: dictionaries from contexts to counts, no tries, no C."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from megatron_tlt.models.decoders.keys import TOKEN_STEP, mix, row_keys

NEGLIGIBLE = 0.0313


def gumbel(request_key: int, position: int, token: int) -> float:
    """The policy's noise, in double precision."""
    key = int(row_keys(np.array([request_key], np.uint64), np.array([position]))[0])
    z = mix(np.array([(key + (token + 1) * TOKEN_STEP) & ((1 << 64) - 1)], np.uint64))
    return -math.log(-math.log(((int(z[0]) >> 40) + 0.5) / (1 << 24)))


@dataclass
class NaiveCounts:
    """What followed each context of at most `depth` tokens."""

    depth: int
    follow: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def add(self, before: list[int], tokens: list[int]) -> None:
        """Counts `tokens`, which stand behind `before`."""
        text = before + tokens
        for i in range(len(before), len(text)):
            for length in range(min(self.depth, i) + 1):
                after = self.follow.setdefault(tuple(text[i - length : i]), {})
                after[text[i]] = after.get(text[i], 0) + 1

    def count(self, string: list[int]) -> int:
        return self.follow.get(tuple(string[:-1]), {}).get(string[-1], 0)


def distribution(counts: NaiveCounts, text: list[int]) -> tuple[dict[int, float], int]:
    """Shares of the candidates behind `text`, and the longest context that something followed."""
    shares: dict[int, float] = {}
    rest, longest = 1.0, 0
    for length in range(min(counts.depth, len(text)), 0, -1):
        after = counts.follow.get(tuple(text[-length:]))
        if after is None or rest <= NEGLIGIBLE:
            continue
        longest = max(longest, length)
        unit = rest / (sum(after.values()) + len(after))
        for token, count in after.items():
            shares[token] = shares.get(token, 0.0) + unit * count
        rest = unit * len(after)
    return shares, longest


def ranking(shares: dict[int, float], key: int, position: int, noisy: bool) -> list[tuple[float, int]]:
    """(score, token) of all candidates, best first, the smaller token among equals."""
    noise = {t: gumbel(key, position, t) if noisy and len(shares) > 1 else 0.0 for t in shares}
    return sorted(((math.log(s) + noise[t], t) for t, s in shares.items()), key=lambda x: (-x[0], x[1]))

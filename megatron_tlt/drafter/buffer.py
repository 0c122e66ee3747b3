"""What the drafter trains on between rollouts: a bounded buffer of answers with the policy's hidden states.

A rank that runs dry early has had short answers, so this step's alone would teach it the beginnings of thoughts
only. Beside them stand the longer half of the previous steps' answers (their shorter half is dropped as soon as a
step begins), and they are drawn as often as it takes for long answers to have the share of tokens that they had in
the previous step, at most every second time. Once each of this step's answers has been drawn, all that is held is drawn
alike: a few answers again and again would be learned by heart, and the rest forgotten. Long answers of other replicas
(`add_shared`, once a step is over) count as previous ones, and as long ones that there were.

When the budget is short: the oldest version goes first, its shortest answers first; this step's go by lot, each with
the same chance whenever it came, so that what stays of its own is a fair sample of the lengths. An answer of which
only the end is held is as long as it was.

Legend: L tokens of an answer with its prompt, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from megatron_tlt.drafter.batching import DraftSequence, pack, windows
from megatron_tlt.types import HiddenStateSample

_STRATA = 4  # length classes that take turns
_MOST_FROM_BEFORE = 0.5  # of the samples, as long as this step has answers

Key = tuple[int, int, int]  # policy version, prompt, sample
_Group = list[tuple[Key, DraftSequence]]


@dataclass(slots=True)
class BufferCounters:
    """What went through the buffer since the run began."""

    added: int = 0
    dropped_by_age: int = 0
    dropped_by_budget: int = 0
    dropped_short: int = 0  # the shorter half of a step that is over
    dropped_empty: int = 0  # no answer token to predict
    cut: int = 0  # larger than the whole budget: only their ends were kept, or not even those
    taken: int = 0  # of other replicas, and held


@dataclass(slots=True)
class _Entry:
    key: Key
    sequence: DraftSequence
    step: int
    size: int  # bytes
    lot: float  # in [0, 1), a function of seed and key


class HiddenStateBuffer:
    """Holds at most `budget_bytes` of tokens and hidden states. What is sampled is a function of the seed and of what
    was added in which step, not of the order within the step.
    """

    def __init__(self, budget_bytes: int, window: int, max_age: int, seed: int):
        """`window` is the most tokens in one piece of an answer; `max_age` is in policy versions."""
        self.counters = BufferCounters()
        self._budget, self._window, self._max_age, self._seed = budget_bytes, window, max_age, seed
        self._entries: dict[Key, _Entry] = {}
        self._bytes = self._step = self._epochs = 0
        self._owed = 0.0  # samples of previous steps that are due
        self._is_drawn = False  # each of this step's answers, at least once
        self._offered: list[int] = []  # lengths of this step's answers, kept or not
        self._taken: list[int] = []  # and of other replicas' answers
        self._median, self._long_share = (
            0.0,
            0.0,
        )  # of the previous step: length, share of tokens at or above it
        self._order: dict[bool, list[_Group]] = {
            True: [],
            False: [],
        }  # what is left of an epoch, by "this step's"
        self._order_of = 0  # budget the orders were made for

    # -- filling --------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int) -> None:
        """A rollout by `policy_version` begins: drops what is too old, and the shorter half of the step before."""
        if self._offered:
            lengths = np.array(self._offered)
            self._median = float(np.median(lengths))
            # Of all answers: or whoever had short ones would hardly draw long ones.
            lengths = np.append(lengths, self._taken)
            self._long_share = float(lengths[lengths >= self._median].sum() / lengths.sum())
        over = [e for e in self._entries.values() if e.step == self._step]
        short = [e for e in over if e.sequence.reach < self._median] if self._offered else []
        self.counters.dropped_short += self._drop(short)
        self._step, self._owed, self._is_drawn = self._step + 1, 0.0, False
        self._offered, self._taken = [], []
        self._order = {True: [], False: []}
        self.evict(policy_version)

    def evict(self, policy_version: int) -> None:
        """Drops what is more than `max_age` versions older than `policy_version`."""
        old = [e for e in self._entries.values() if policy_version - e.key[0] > self._max_age]
        self.counters.dropped_by_age += self._drop(old)

    def add(self, chunk: HiddenStateSample) -> None:
        """Takes an answer in; it replaces one of the same version, prompt and sample.

        Hidden states are kept as they are, and copied only where they are a part of larger storage.
        """
        length = len(chunk.token_ids)
        assert tuple(chunk.hidden.shape[:1]) == (length - 1,), f"{length} tokens, {chunk.hidden.shape}"
        self.counters.added += 1
        self._offered.append(length)
        sequence = DraftSequence(
            torch.from_numpy(np.asarray(chunk.token_ids, np.int64)),
            chunk.hidden,
            chunk.prompt_len,
            key=chunk.key,
            policy_version=chunk.policy_version,
        )
        if not sequence.num_bases:
            self.counters.dropped_empty += 1
            return
        key = (chunk.policy_version, chunk.prompt_id, chunk.sample_index)
        self._drop([e for e in (self._entries.get(key),) if e is not None])
        if _size(sequence) > self._budget:
            self.counters.cut += 1
            sequence = _ending(sequence, self._window)
        if _size(sequence) > self._budget:
            self.counters.dropped_by_budget += 1
            return
        sequence.hidden = _alone(sequence.hidden)
        self._keep(key, sequence)

    def _keep(self, key: Key, sequence: DraftSequence) -> None:
        lot = float(np.random.default_rng((self._seed, *key)).random())
        entry = _Entry(key, sequence, self._step, _size(sequence), lot)
        self._entries[key] = entry
        self._bytes += entry.size
        self._order[True] = []  # this step's epoch begins anew with the new answer in it
        self._is_drawn = False
        self._fit()

    def longest(self, budget_bytes: int) -> list[tuple[Key, DraftSequence]]:
        """This step's answers that are held, longest first, as many as fit; of the first that does not, the end."""
        found: list[tuple[Key, DraftSequence]] = []
        ours = [e for e in self._entries.values() if e.step == self._step]
        for entry in sorted(ours, key=lambda e: (-e.sequence.reach, e.key)):
            if entry.size > budget_bytes:
                end = _ending(entry.sequence, budget_bytes * entry.sequence.length // entry.size)
                if end.num_bases and _size(end) <= budget_bytes:
                    found.append((entry.key, end))
                break
            found.append((entry.key, entry.sequence))
            budget_bytes -= entry.size
        return found

    def add_shared(self, key: Key, sequence: DraftSequence) -> None:
        """Takes an answer of another replica in, if it is new and fits.

        Only between the end of a step and `begin_step`, which drops it if it is shorter than this step's median.
        """
        if key in self._entries or _size(sequence) > self._budget:
            return
        self.counters.taken += 1
        self._taken.append(sequence.reach)
        self._keep(key, sequence)

    def _fit(self) -> None:
        excess = self._bytes - self._budget
        if excess <= 0:
            return
        victims = []
        for entry in sorted(self._entries.values(), key=self._worth):
            victims.append(entry)
            excess -= entry.size
            if excess <= 0:
                break
        self.counters.dropped_by_budget += self._drop(victims)

    def _worth(self, entry: _Entry) -> tuple[bool, int, float, Key]:
        """Least first."""
        ours = entry.step == self._step
        return ours, 0 if ours else entry.key[0], entry.lot if ours else entry.sequence.reach, entry.key

    def _drop(self, entries: Sequence[_Entry]) -> int:
        """Frees them, also from the orders of running epochs; their number."""
        gone = {entry.key for entry in entries}
        for key in gone:
            self._bytes -= self._entries.pop(key).size
        if gone:
            for ours, groups in self._order.items():
                left = [[piece for piece in group if piece[0] not in gone] for group in groups]
                self._order[ours] = [group for group in left if group]
        return len(gone)

    # -- drawing --------------------------------------------------------------------------------------------

    def sample(
        self, budget_tokens: int, usable: Callable[[int], bool] | None = None
    ) -> list[DraftSequence] | None:
        """Pieces of about one length and of one policy version; None if there are none.

        Their padded size (count x longest) is at most `budget_tokens`; no piece is longer. Every piece of this step's
        answers comes once before one comes again, and so for the previous steps'; classes of length take turns.
        `usable` tells which versions may be drawn (all by default).
        """
        if budget_tokens != self._order_of:
            self._order, self._order_of = {True: [], False: []}, budget_tokens
        self._owed += self._share_of_before()
        ours = self._owed < 1.0
        self._owed -= 0.0 if ours else 1.0
        for source in (ours, not ours):
            group = self._next(source, usable)
            if group:
                return [piece for _, piece in group]
        return None

    def _share_of_before(self) -> float:
        """Which share of the samples previous steps give."""
        now = [e for e in self._entries.values() if e.step == self._step]
        if len(now) == len(self._entries):
            return 0.0
        tokens = sum(e.sequence.length for e in now)
        if self._is_drawn or not tokens:
            return 1.0 - tokens / sum(e.sequence.length for e in self._entries.values())
        long = sum(e.sequence.length for e in now if e.sequence.reach >= self._median) / tokens
        missing = (self._long_share - long) / max(1e-9, 1.0 - long)
        return min(_MOST_FROM_BEFORE, max(0.0, missing))

    def _next(self, ours: bool, usable: Callable[[int], bool] | None) -> _Group | None:
        for _ in range(2):
            groups = self._order[ours]
            while groups:
                group = groups.pop()
                if usable is None or usable(group[0][0][0]):
                    self._is_drawn |= ours and not groups
                    return group
            self._order[ours] = self._new_epoch(ours)
        return None

    def _new_epoch(self, ours: bool) -> list[_Group]:
        """All pieces of this step's (or of previous steps') answers, in the order of drawing, last first."""
        self._epochs += 1
        rng = np.random.default_rng((self._seed, self._epochs))
        most = min(self._window, self._order_of)
        by_version: dict[int, list[tuple[Key, DraftSequence]]] = {}
        for key in sorted(k for k, e in self._entries.items() if (e.step == self._step) == ours):
            for piece in windows(self._entries[key].sequence, most):
                by_version.setdefault(key[0], []).append((key, piece))
        groups: list[_Group] = []
        for pieces in by_version.values():
            shuffled = [pieces[i] for i in rng.permutation(len(pieces))]
            owner = {id(piece): key for key, piece in shuffled}
            packed = pack([piece for _, piece in shuffled], self._order_of)
            groups += [[(owner[id(piece)], piece) for piece in group] for group in packed]
        return _mixed(groups, rng)

    # -- looking --------------------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Policy versions of what is held, ascending."""
        return sorted({key[0] for key in self._entries})

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of tokens and hidden states that are held."""
        return self._bytes

    def metrics(self) -> dict[str, float]:
        """What is held, and the counters."""
        counted = {f.name: float(getattr(self.counters, f.name)) for f in fields(self.counters)}
        return {"chunks": float(len(self)), "bytes": float(self._bytes), **counted}

    def load_counters(self, counters: Mapping[str, float]) -> None:
        """Takes the counters of `metrics`; what a resumed run holds is not theirs."""
        names = [f.name for f in fields(self.counters)]
        self.counters = BufferCounters(**{name: int(counters.get(name, 0)) for name in names})


def _mixed(groups: list[_Group], rng: np.random.Generator) -> list[_Group]:
    """Groups in an order in which every stretch has the whole's mix of lengths."""
    by_length = sorted(groups, key=lambda group: max(piece.length for _, piece in group))
    place = np.empty(len(groups))
    for stratum in np.array_split(np.arange(len(groups)), min(_STRATA, max(1, len(groups)))):
        places = (np.arange(len(stratum)) + rng.random()) / max(1, len(stratum))
        place[stratum] = rng.permutation(places)
    return [by_length[i] for i in np.argsort(place, kind="stable")]


def _size(sequence: DraftSequence) -> int:
    return sequence.token_ids.nbytes + sequence.hidden.nbytes


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, not keeping anything else in memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _ending(sequence: DraftSequence, size: int) -> DraftSequence:
    """The last `size` tokens, in memory of their own."""
    begin = max(0, sequence.length - size)
    return DraftSequence(
        sequence.token_ids[begin:].clone(),
        sequence.hidden[begin:].clone(),
        max(1, sequence.prompt_len - begin),
        offset=sequence.offset + begin,
        key=sequence.key,
        answer_at=sequence.answer_start,
        policy_version=sequence.policy_version,
    )

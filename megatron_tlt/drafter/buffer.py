"""`HiddenStateBuffer`: a bounded buffer of answers with the policy's hidden states, which the drafter trains on.

A rank that becomes idle early has had short answers, and training on those alone would teach the drafter the beginnings
of answers only. So the longer half of the previous steps' answers is kept (their shorter half is dropped as soon as a
step begins), and they are drawn as often as it takes for long answers to have the share of tokens that they had in the
previous step, at most every second time. Once each of this step's answers has been drawn, all that is held is drawn
alike: otherwise a few answers would be learned by heart. Long answers of other replicas (`add_shared`, once a
step is over) count as previous ones, also in that share of tokens.

When the budget is short: the oldest version goes first, its shortest answers first; of this step's answers a random
choice stays, whatever the order they came in, so that it is a fair sample of the lengths. The length of an answer of
which only the end is held is that of the whole answer.

Legend: L tokens of an answer with its prompt, H hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_tlt.drafter.batching import DraftSequence, pack, windows
from megatron_tlt.types import HiddenStateSample

_STRATA = 4  # length classes that take turns
_MAX_PREVIOUS_SHARE = 0.5  # of the samples, as long as some answers of this step were not drawn

Key = tuple[int, int, int]  # policy version, prompt, sample
_Group = list[tuple[Key, DraftSequence]]

COUNTERS = (
    "added",
    "dropped_by_age",
    "dropped_by_budget",
    "dropped_short",  # the shorter half of a step that is over
    "dropped_empty",  # no answer token to predict
    "cut",  # larger than the whole budget: only their ends were kept, or not even those
    "shared",  # of other replicas, and held
)


@dataclass(slots=True)
class _Entry:
    key: Key
    sequence: DraftSequence
    step: int
    size: int  # bytes
    priority: float  # in [0, 1), random, a function of seed and key


class HiddenStateBuffer:
    """Holds at most `budget_bytes` of tokens and hidden states. What is sampled is a function of the seed and of what
    was added in which step, not of the order within the step.
    """

    def __init__(self, budget_bytes: int, window: int, max_age: int, seed: int):
        """`window` is the most tokens in one window of an answer; `max_age` is in policy versions."""
        self.counters: Counter[str] = Counter()  # of `COUNTERS`, since the run began
        self._budget, self._window, self._max_age, self._seed = budget_bytes, window, max_age, seed
        self._entries: dict[Key, _Entry] = {}
        self._bytes = self._step = self._epochs = 0
        self._owed = 0.0  # samples of previous steps that are due
        self._all_drawn = False  # each of this step's answers, at least once
        self._lengths: list[int] = []  # of this step's answers, kept or not
        self._shared_lengths: list[int] = []  # and of other replicas' answers
        self._median = 0.0  # length of the previous step's answers
        self._long_share = 0.0  # of the previous step's tokens, in answers of that length or more
        self._epoch_of: dict[bool, list[_Group]] = {True: [], False: []}  # not yet drawn, by "of this step"
        self._batch_tokens = 0  # that those groups were made for

    # -- filling --------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int) -> None:
        """A rollout by `policy_version` begins: drops what is too old, and the shorter half of the step before."""
        if self._lengths:
            lengths = np.array(self._lengths)
            self._median = float(np.median(lengths))
            # Of all answers: a replica with short ones of its own would hardly draw long ones.
            lengths = np.append(lengths, self._shared_lengths)
            self._long_share = float(lengths[lengths >= self._median].sum() / lengths.sum())
            short = [e for e in self._entries.values() if e.step == self._step]
            self._drop((e for e in short if e.sequence.reach < self._median), "dropped_short")
        self._step, self._owed, self._all_drawn = self._step + 1, 0.0, False
        self._lengths, self._shared_lengths = [], []
        self._epoch_of = {True: [], False: []}
        old = [e for e in self._entries.values() if policy_version - e.key[0] > self._max_age]
        self._drop(old, "dropped_by_age")

    def add(self, sample: HiddenStateSample) -> None:
        """Adds an answer; it replaces one of the same version, prompt and sample.

        Hidden states are kept as they are, and copied only where they are a part of larger storage.
        """
        length = len(sample.token_ids)
        assert tuple(sample.hidden.shape[:1]) == (length - 1,), f"{length} tokens, {sample.hidden.shape}"
        self.counters["added"] += 1
        self._lengths.append(length)
        sequence = DraftSequence.of(sample, sample.hidden)
        if not sequence.num_bases:
            self.counters["dropped_empty"] += 1
            return
        key = (sample.policy_version, sample.prompt_id, sample.sample_index)
        self._drop([self._entries[key]] if key in self._entries else [])
        if _size(sequence) > self._budget:
            self.counters["cut"] += 1
            sequence = _ending(sequence, self._window)
        if _size(sequence) > self._budget:
            self.counters["dropped_by_budget"] += 1
            return
        if sequence.hidden.untyped_storage().nbytes() > sequence.hidden.nbytes:
            sequence.hidden = sequence.hidden.clone()
        self._keep(key, sequence)

    def add_shared(self, key: Key, sequence: DraftSequence) -> None:
        """Adds an answer of another replica, if it is new and fits.

        Only between the end of a step and `begin_step`, which drops it if it is shorter than this step's median.
        """
        if key in self._entries or _size(sequence) > self._budget:
            return
        self.counters["shared"] += 1
        self._shared_lengths.append(sequence.reach)
        self._keep(key, sequence)

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

    def _keep(self, key: Key, sequence: DraftSequence) -> None:
        """Adds an entry and drops others until the budget holds."""
        priority = float(np.random.default_rng((self._seed, *key)).random())
        self._entries[key] = entry = _Entry(key, sequence, self._step, _size(sequence), priority)
        self._bytes += entry.size
        self._epoch_of[True] = []  # this step's epoch begins anew with the new answer in it
        self._all_drawn = False
        excess, dropped = self._bytes - self._budget, []
        for other in sorted(self._entries.values(), key=self._worth) if excess > 0 else ():
            dropped.append(other)
            excess -= other.size
            if excess <= 0:
                break
        self._drop(dropped, "dropped_by_budget")

    def _worth(self, entry: _Entry) -> tuple[bool, int, float, Key]:
        """Least first."""
        if entry.step == self._step:
            return True, 0, entry.priority, entry.key
        return False, entry.key[0], entry.sequence.reach, entry.key

    def _drop(self, entries: Iterable[_Entry], reason: str | None = None) -> None:
        """Frees them, also from running epochs, and counts them under `reason`."""
        gone = {entry.key for entry in entries}
        if not gone:
            return
        if reason is not None:
            self.counters[reason] += len(gone)
        for key in gone:
            self._bytes -= self._entries.pop(key).size
        for ours, groups in self._epoch_of.items():
            left = [[window for window in group if window[0] not in gone] for group in groups]
            self._epoch_of[ours] = [group for group in left if group]

    # -- drawing --------------------------------------------------------------------------------------------

    def sample(self, batch_tokens: int) -> list[DraftSequence] | None:
        """Windows of about one length; None if there are none.

        Their padded size (count x longest) is at most `batch_tokens`; no window is longer. Every window of this step's
        answers comes once before one comes again, and so for the previous steps'; classes of length take turns.
        """
        if batch_tokens != self._batch_tokens:
            self._epoch_of, self._batch_tokens = {True: [], False: []}, batch_tokens
        self._owed += self._previous_share()
        ours = self._owed < 1.0
        self._owed -= 0.0 if ours else 1.0
        for source in (ours, not ours):
            group = self._next(source)
            if group:
                return [window for _, window in group]
        return None

    def _previous_share(self) -> float:
        """The share of the samples that previous steps give."""
        now = [e for e in self._entries.values() if e.step == self._step]
        if len(now) == len(self._entries):
            return 0.0
        tokens = sum(e.sequence.length for e in now)
        if self._all_drawn or not tokens:
            return 1.0 - tokens / sum(e.sequence.length for e in self._entries.values())
        long = sum(e.sequence.length for e in now if e.sequence.reach >= self._median) / tokens
        missing = (self._long_share - long) / max(1e-9, 1.0 - long)
        return min(_MAX_PREVIOUS_SHARE, max(0.0, missing))

    def _next(self, ours: bool) -> _Group | None:
        for _ in range(2):
            groups = self._epoch_of[ours]
            if groups:
                group = groups.pop()
                self._all_drawn |= ours and not groups
                return group
            self._epoch_of[ours] = self._new_epoch(ours)
        return None

    def _new_epoch(self, ours: bool) -> list[_Group]:
        """All windows of this step's (or of previous steps') answers, in the order of drawing, last first."""
        self._epochs += 1
        rng = np.random.default_rng((self._seed, self._epochs))
        found: _Group = []
        for key in sorted(k for k, e in self._entries.items() if (e.step == self._step) == ours):
            own = windows(self._entries[key].sequence, min(self._window, self._batch_tokens))
            found += [(key, window) for window in own]
        shuffled = [found[i] for i in rng.permutation(len(found))]
        owner = {id(window): key for key, window in shuffled}
        packed = pack([window for _, window in shuffled], self._batch_tokens)
        return _mixed([[(owner[id(window)], window) for window in group] for group in packed], rng)

    # -- what is held ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def metrics(self) -> dict[str, float]:
        """Answers and bytes that are held, and the counters."""
        counted = {name: float(self.counters[name]) for name in COUNTERS}
        return {"answers": float(len(self)), "bytes": float(self._bytes), **counted}

    def load_counters(self, metrics: Mapping[str, float]) -> None:
        """Takes the counters out of what `metrics` returned, not what was held."""
        self.counters = Counter({name: int(metrics.get(name, 0)) for name in COUNTERS})


def _mixed(groups: list[_Group], rng: np.random.Generator) -> list[_Group]:
    """Groups in an order in which every stretch has the whole's mix of lengths."""
    by_length = sorted(groups, key=lambda group: max(window.length for _, window in group))
    place = np.empty(len(groups))
    for stratum in np.array_split(np.arange(len(groups)), min(_STRATA, max(1, len(groups)))):
        places = (np.arange(len(stratum)) + rng.random()) / max(1, len(stratum))
        place[stratum] = rng.permutation(places)
    return [by_length[i] for i in np.argsort(place, kind="stable")]


def _size(sequence: DraftSequence) -> int:
    return sequence.token_ids.nbytes + sequence.hidden.nbytes


def _ending(sequence: DraftSequence, size: int) -> DraftSequence:
    """The last `size` tokens, in memory of their own."""
    begin = max(0, sequence.length - size)
    end = sequence.part(begin, sequence.length, max(1, sequence.prompt_len - begin))
    end.token_ids, end.hidden = end.token_ids.clone(), end.hidden.clone()
    return end

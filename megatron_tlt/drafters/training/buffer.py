"""`HiddenStateBuffer`: a bounded buffer of responses with the policy's hidden states, which the drafter trains on.

A rank that becomes idle early has had short responses, and training on those alone would teach the drafter the
beginnings of responses only; training on few responses again and again would teach it just those. So responses of
several steps are kept, long responses of other replicas are added once a step is over (`add_shared`), and all responses
in the buffer are drawn with one probability.

When the budget is short: the oldest version goes first, its shortest responses first; of this step's responses a random
choice stays, whatever the order they came in, so that it is a fair sample of the lengths. The length of another
replica's response of which only the end is held is that of the whole response.

Legend: L tokens of a response with its prompt, H hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.drafters.training.batching import DraftSequence, epoch
from megatron_tlt.types import HiddenStateSample

SampleKey = tuple[int, int, int]  # policy version, prompt, sample

COUNTERS = (
    "added",
    "dropped_by_age",
    "dropped_by_budget",
    "shared",  # of other replicas, and held
)


@dataclass(slots=True)
class _Entry:
    key: SampleKey
    sequence: DraftSequence
    step: int
    size: int  # bytes
    priority: float  # in [0, 1), random, a function of seed and key


class HiddenStateBuffer:
    """Holds at most `budget_bytes` of tokens and hidden states. The samples are a function of the seed and of the
    responses added in each step, not of their order within the step.
    """

    def __init__(self, budget_bytes: int, window: int, max_age: int, seed: int):
        """`window` is the most tokens in one window of a response; `max_age` is in policy versions."""
        self.counters: Counter[str] = Counter()  # of `COUNTERS`, since this start of the run
        self._budget, self._window, self._max_age, self._seed = budget_bytes, window, max_age, seed
        self._entries: dict[SampleKey, _Entry] = {}
        self._offered: set[SampleKey] = set()  # held or dropped since, whose hidden states are on their way
        self._bytes = self._step = self._epochs = 0
        self._epoch: list[list[DraftSequence]] = []  # batches that are not yet drawn; empty: the contents have changed
        self._batch_tokens = 0  # that those were made for

    # -- filling --------------------------------------------------------------------------------------------

    def begin_step(self, policy_version: int) -> None:
        """A rollout by `policy_version` begins: drops what is too old."""
        self._step += 1
        old = [e for e in self._entries.values() if policy_version - e.key[0] > self._max_age]
        self._drop(old, "dropped_by_age")

    def add(self, sample: HiddenStateSample) -> None:
        """Adds a response; it replaces one of the same version, prompt and sample.

        Hidden states are kept as they are, and copied only where they are a part of larger storage. Those of a response
        that was offered are dropped where others have taken its place.
        """
        length = sample.trajectory.length
        assert tuple(sample.hidden.shape[:1]) == (length - 1,), f"{length} tokens, {sample.hidden.shape}"
        sequence, key = DraftSequence.of(sample), _key_of(sample)
        if sequence.hidden.untyped_storage().nbytes() > sequence.hidden.nbytes:
            sequence.hidden = sequence.hidden.clone()
        if key not in self._offered:
            self._add(key, sequence)
            return
        self._offered.remove(key)
        if key in self._entries:
            self._entries[key].sequence = sequence

    def offer(self, sample: HiddenStateSample) -> bool:
        """Adds a response whose hidden states, here on the meta device, `add` brings later. False: it is not kept, and
        they need not be read.
        """
        key = _key_of(sample)
        self._add(key, DraftSequence.of(sample))
        if key in self._entries:
            self._offered.add(key)
        return key in self._entries

    def drop_offered(self) -> None:
        """Forgets responses whose hidden states have not come: none will."""
        self._drop([self._entries[key] for key in self._offered if key in self._entries])
        self._offered.clear()

    def _add(self, key: SampleKey, sequence: DraftSequence) -> None:
        self.counters["added"] += 1
        if not sequence.num_bases:
            return
        self._drop([self._entries[key]] if key in self._entries else [])
        if _size(sequence) > self._budget:
            self.counters["dropped_by_budget"] += 1
            return
        self._keep(key, sequence)

    def add_shared(self, key: SampleKey, sequence: DraftSequence) -> None:
        """Adds a response of another replica, if it is new and fits.

        Only between the end of a step and `begin_step`.
        """
        if key in self._entries or _size(sequence) > self._budget:
            return
        self.counters["shared"] += 1
        self._keep(key, sequence)

    def longest(self, budget_bytes: int) -> list[tuple[SampleKey, DraftSequence]]:
        """This step's responses that are held, longest first, as many as fit; of the first that does not, the end."""
        found: list[tuple[SampleKey, DraftSequence]] = []
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

    def _keep(self, key: SampleKey, sequence: DraftSequence) -> None:
        """Adds an entry and drops others until the budget holds."""
        priority = float(np.random.default_rng((self._seed, *key)).random())
        self._entries[key] = entry = _Entry(key, sequence, self._step, _size(sequence), priority)
        self._bytes += entry.size
        self._epoch = []
        excess, dropped = self._bytes - self._budget, []
        for other in sorted(self._entries.values(), key=self._worth) if excess > 0 else ():
            dropped.append(other)
            excess -= other.size
            if excess <= 0:
                break
        self._drop(dropped, "dropped_by_budget")

    def _worth(self, entry: _Entry) -> tuple[bool, int, float, SampleKey]:
        """Least first."""
        if entry.step == self._step:
            return True, 0, entry.priority, entry.key
        return False, entry.key[0], entry.sequence.reach, entry.key

    def _drop(self, entries: Iterable[_Entry], reason: str | None = None) -> None:
        """Frees them, and counts them under `reason`."""
        for entry in entries:
            self._bytes -= self._entries.pop(entry.key).size
            self._epoch = []
            if reason is not None:
                self.counters[reason] += 1

    # -- drawing --------------------------------------------------------------------------------------------

    def sample(self, batch_tokens: int) -> list[DraftSequence] | None:
        """Windows of about one length; None if there are none.

        Their padded size (count x longest) is at most `batch_tokens`; no window is longer. Every window of the
        buffer's responses comes once before one comes again.
        """
        if batch_tokens != self._batch_tokens or not self._epoch:
            self._batch_tokens, self._epochs = batch_tokens, self._epochs + 1
            held = [self._entries[key].sequence for key in sorted(self._entries)]
            rng = np.random.default_rng((self._seed, self._epochs))
            self._epoch = epoch(held, batch_tokens, min(self._window, batch_tokens), rng)
        return self._epoch.pop() if self._epoch else None

    # -- what is held ---------------------------------------------------------------------------------------

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the policy drew each token in this step's responses that are held, int64 [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for entry in self._entries.values():
            if entry.step == self._step:
                drawn = entry.sequence.token_ids[torch.from_numpy(entry.sequence.drawn)]
                counts += torch.bincount(drawn, minlength=vocab_size)
        return counts

    def __len__(self) -> int:
        return len(self._entries)

    def metrics(self) -> dict[str, float]:
        """Responses and bytes that are held, and the counters."""
        counted = {name: float(self.counters[name]) for name in COUNTERS}
        return {"responses": float(len(self)), "bytes": float(self._bytes), **counted}


def _key_of(sample: HiddenStateSample) -> SampleKey:
    trajectory = sample.trajectory
    return trajectory.policy_version, trajectory.prompt_id, trajectory.sample_index


def _size(sequence: DraftSequence) -> int:
    return sequence.token_ids.nbytes + sequence.hidden.nbytes


def _ending(sequence: DraftSequence, size: int) -> DraftSequence:
    """The last `size` tokens, in memory of their own."""
    begin = max(0, sequence.length - size)
    end = sequence.part(begin, sequence.length)
    end.token_ids, end.hidden = end.token_ids.clone(), end.hidden.clone()
    return end

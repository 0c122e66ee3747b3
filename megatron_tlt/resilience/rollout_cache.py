"""The rollout bank: finished answers of the steps since the last checkpoint, kept in run_dir/bank and reused.

    rank 0   rollout =====x=====x==x====X  killed            rollout (only what is missing) ==== | score ...
    bank               add   add add      --- restart --->   read
A banked answer is what the engine would generate again: tokens and log-probs are a function of seed, prompt and weights
(docs/numerics.md), and the bank's key names all three. Its hidden states are not kept, so a drafter in training sees
fewer answers of a resumed step; the policy does not notice.

    run_dir/bank/step-000013/replica-00001-5f0c2a.bank      answers of step 13 by replica 1 of one attempt

Every replica writes what it answers and reads what anybody wrote, so the number of ranks may change. Rank 0 removes a
step's directory when a checkpoint covers it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_tlt.resilience.rollout_cache_file import prompt_sum, read_file
from megatron_tlt.resilience.rollout_cache_writer import RolloutCacheWriter
from megatron_tlt.sync.fingerprint import WeightFingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tlt.config.rollout_cache import RolloutCacheSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import ProgressCallback, RolloutBackend
    from megatron_tlt.types import Prompt, Sample, SamplingParams

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step-\d{6,}")
_MIB = 1 << 20
Answers = dict[tuple[int, int], "Sample"]  # by (prompt id, sample index)


@dataclass(frozen=True)
class Rollout:
    """What is asked of the engine in every step."""

    params: SamplingParams
    num_samples: int


class KeyedEngine(Protocol):
    """The part of a backend with keyed sampling that the bank needs."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_samples: int,
        on_progress: ProgressCallback | None = None,
        have: Iterable[tuple[int, int]] = (),
        on_answer: Callable[[Sample], None] | None = None,
        goes_on: bool = False,
    ) -> list[Sample]:
        """As `RolloutBackend.generate`, without the answers (prompt id, sample index) in `have`.

        `on_answer` gets each answer; `goes_on`: it belongs to the `generate` before.
        """


class NoRolloutCache:
    """Rollouts that nobody keeps."""

    def __init__(self, backend: RolloutBackend, plan: Rollout, reason: str | None = None):
        """`reason`: why not, where a bank was asked for; given to the rank that says so."""
        self._backend, self._plan = backend, plan
        if reason is not None:
            _log.info("no rollout bank, a restart answers an unfinished step again: %s", reason)

    def start(self, steps_done: int) -> None:
        """Nothing there."""

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Passes the push on."""
        return weights

    def begin_step(self, step: int, policy_version: int) -> None:
        """Nothing to look up."""

    def generate(self, prompts: Sequence[Prompt], on_progress: ProgressCallback) -> list[Sample]:
        """The backend's."""
        return self._backend.generate(prompts, self._plan.params, self._plan.num_samples, on_progress)

    def keeper(self, prompts: Sequence[Prompt]) -> Callable[[Sample], None] | None:
        """Nobody."""
        return None

    def end_step(self) -> dict[str, float]:
        """No figures."""
        return {}

    def covered_by(self, step: int | None) -> None:
        """Nothing to remove."""

    def finish(self) -> None:
        """Nothing to remove."""

    def close(self) -> None:
        """Nothing open."""


class RolloutCache:
    """One rank's part; the first rank of a replica writes, all of them read. It is a help: it never ends a run."""

    def __init__(
        self,
        section: RolloutCacheSection,
        run_dir: Path,
        world: World,
        engine: KeyedEngine,
        plan: Rollout,
        *,
        identity: Mapping[str, Any],
        tp: int,
        fresh: bool,
    ):
        """`identity`: what an answer depends on besides prompt and weights, JSON-able. `fresh`: the run starts anew."""
        self._directory, self._world = run_dir / "bank", world
        self._engine, self._plan = engine, plan
        self._identity, self._fresh = dict(identity), fresh
        self._replica, self._speaks = world.rank // tp, world.rank % tp == 0
        self._fingerprint = WeightFingerprint(world)
        self._attempt = os.urandom(4).hex()
        self._writer: RolloutCacheWriter | None = None
        if self._speaks:
            self._writer = RolloutCacheWriter(section.sync_seconds, section.max_mib * _MIB)
        self._last_old = 0  # last step that an earlier attempt left answers of, by any rank's look
        self._has_old = False  # whether there may be some of the present step
        self._old: list[Path] = []  # files of earlier attempts at the present step
        self._key: dict[str, Any] = {}
        self._version = 0
        self._reused = 0

    def start(self, steps_done: int) -> None:
        """The run begins after `steps_done` steps: what is covered, or not wanted, goes. Collective."""
        if self._world.is_main:
            for directory in self._steps(0 if self._fresh else steps_done, later=self._fresh):
                shutil.rmtree(directory, ignore_errors=True)
        self._world.barrier()
        last = max((_number(path) for path in self._steps(steps_done, later=True)), default=0)
        self._last_old = max(self._world.all_gather_object(last))

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes a push on; the bank's key names these weights."""
        return self._fingerprint.watch(weights)

    def begin_step(self, step: int, policy_version: int) -> None:
        """Rollouts of `step` (1-based) by the weights watched last begin. Collective."""
        self._version, self._reused = policy_version, 0
        self._key = {
            **self._identity,
            "policy_version": policy_version,
            "weights": self._fingerprint.take(),
        }
        directory = self._directory / f"step-{step:06d}"
        self._has_old = step <= self._last_old
        self._old = sorted(directory.glob("replica-*.bank")) if self._has_old else []
        if self._writer is not None:
            name = f"replica-{self._replica:05d}-{self._attempt}.bank"
            self._writer.begin(directory / name, self._key)

    def generate(self, prompts: Sequence[Prompt], on_progress: ProgressCallback) -> list[Sample]:
        """All samples of all prompts, sorted by (prompt id, sample index): banked ones, and the engine's for the rest.

        Collective while answers of an earlier attempt may be there.
        """
        banked = self._agreed(self._read(_sums(prompts))) if self._has_old else {}
        plan, keep = self._plan, self.keeper(prompts)
        made = self._engine.generate(prompts, plan.params, plan.num_samples, on_progress, banked.keys(), keep)
        self._reused += len(banked)
        return sorted([*banked.values(), *made], key=lambda s: (s.prompt_id, s.sample_index))

    def keeper(self, prompts: Sequence[Prompt]) -> Callable[[Sample], None] | None:
        """Whom to give each answer to these prompts as soon as it is there; None: nobody keeps it."""
        if (writer := self._writer) is None:
            return None
        sums = _sums(prompts)
        return lambda sample: writer.add(sample, sums[sample.prompt_id])

    def end_step(self) -> dict[str, float]:
        """The step's last answer is there; returns this rank's figures, to be added up over ranks."""
        if self._writer is None:
            return {}
        self._writer.end()
        return {
            "rollout/banked": float(self._reused),
            "rollout/bank_disabled": float(self._writer.failure is not None),
        }

    def covered_by(self, step: int | None) -> None:
        """Removes, in the background, the steps up to `step`, that of this run's newest complete checkpoint."""
        if not self._world.is_main or self._writer is None or step is None:
            return
        for directory in self._steps(step, later=False):
            self._writer.remove(directory)

    def finish(self) -> None:
        """The run has done its last step: nobody will need an answer again. Collective."""
        if self._writer is not None:
            self._writer.flush()
        self._world.barrier()  # every file is closed
        if self._world.is_main:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Writes what is under way and ends the writer. Idempotent."""
        if self._writer is not None:
            self._writer.close()

    def _steps(self, step: int, later: bool) -> list[Path]:
        """Directories of the steps up to `step`, or of all later ones."""
        found = [path for path in self._directory.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(path for path in found if (_number(path) > step) == later)

    def _read(self, sums: Mapping[int, int]) -> Answers:
        """Whatever anybody has answered of these prompts, with the present key."""
        found: Answers = {}
        for path in self._old:
            try:
                answers = read_file(path, self._key, sums, self._version)
            except OSError as error:
                _log.warning("%s cannot be read, its answers are made again: %s", path, error)
                continue
            if answers is None:
                _log.info("%s is of other weights or settings: not used", path)
                continue
            found |= {at: sample for at, sample in answers.items() if at[1] < self._plan.num_samples}
        return found

    def _agreed(self, mine: Answers) -> Answers:
        """`mine`, if all ranks of my replica found the same: they must ask their engine for the same. Collective."""
        digest = zlib.crc32(repr(sorted((at, s.token_ids) for at, s in mine.items())).encode())
        everybody = self._world.all_gather_object((self._replica, digest, len(mine), self._speaks))
        total = sum(count for _, _, count, speaks in everybody if speaks)
        if self._world.is_main and total:
            _log.info("%d answers of this step were in the rollout bank", total)
        if len({found for replica, found, _, _ in everybody if replica == self._replica}) == 1:
            return mine
        _log.warning("ranks of replica %d read different answers from the bank: none is used", self._replica)
        return {}


def _sums(prompts: Sequence[Prompt]) -> dict[int, int]:
    """Checksums by prompt id."""
    return {prompt.prompt_id: prompt_sum(prompt) for prompt in prompts}


def _number(directory: Path) -> int:
    """The step of a directory of the bank."""
    return int(directory.name.removeprefix("step-"))

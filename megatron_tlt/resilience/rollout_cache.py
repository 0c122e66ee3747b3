"""Finished responses of the steps since the last checkpoint, kept on disk and reused after a restart.

    rank 0   rollout =====x=====x==x====X  killed            rollout (only what is missing) ==== | score ...
    cache              add   add add      --- restart --->   read

A cached response equals the one that the engine would generate again: tokens and log-probs are a function of seed,
prompt and weights (docs/design/numerics.md), and the key in each file names all three. Hidden states are not kept, so
the drafter trains on fewer responses of a resumed step; the policy is not affected.

    run_dir/rollout_cache/step-000013/replica-00001-5f0c2a.jsonl    responses of step 13 by replica 1 of one start

`generate` and `eval` keep theirs in OUT.unfinished, as step 1, until OUT is written.

Every replica writes its own responses and may use those of all, so the number of ranks may change. The files of an
earlier start are parsed once a step, each by one rank, and all get the places of the responses in them. Rank 0 removes
a step's directory when a checkpoint covers it. Each line of a file is the CRC-32 of its JSON and the JSON: first the
key, then one response a line. A crash tears at most the last line; reading stops at the first line whose checksum is
wrong.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from megatron_tlt.config.dims import is_first_of_engine, rollout_replica
from megatron_tlt.config.run import ROLLOUT_CACHE_BYTES
from megatron_tlt.data.prompt_queue import PromptQueue
from megatron_tlt.distributed.exchange import gather_large
from megatron_tlt.observe.files import naming
from megatron_tlt.observe.reduction import RankMetrics, sums
from megatron_tlt.resilience.response_lines import (
    decode_sample,
    encode_line,
    encode_response,
    prompt_crc,
    whole_bodies,
    whole_lines,
)
from megatron_tlt.types import Prompt, Sample

if TYPE_CHECKING:
    from megatron_tlt.config.run import RolloutCacheSection
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.types import Drawn, GenerateCall

_log = logging.getLogger(__name__)
Responses = dict[tuple[int, int], Sample]  # by (prompt id, sample index)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Where a response is on the disk. Any replica may fetch its prompt: the one that has decodes it."""

    path: Path
    offset: int  # of its line, in bytes
    at: tuple[int, int]  # prompt id, sample index
    prompt_crc: int
    start_crc: int | None  # of the part that earlier steps drew (`_start_crc`); None: there is none

    def read(self) -> Sample:
        """The response. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            line = next(whole_lines(file), None)
        if line is None:
            raise OSError(errno.EIO, "was changed while it was in use", str(self.path))
        return decode_sample(line["sample"])


Found = dict[tuple[int, int], StoredResponse]  # by (prompt id, sample index)


def scan_responses(
    path: Path, key: Mapping[str, Any], on_line: Callable[[], object] = lambda: None
) -> list[StoredResponse] | None:
    """Where the responses of a file are; None for a file of another key. Parses every line, and calls `on_line` before
    it. Raises OSError.
    """
    found = []
    with path.open("rb") as file:
        bodies = whole_bodies(file)
        _, first = next(bodies, (0, b"null"))
        if json.loads(first) != json.loads(json.dumps(key)):
            return None
        for offset, body in bodies:
            on_line()
            line = json.loads(body)
            sample: dict[str, Any] = line["sample"]
            begun, start = sum(count for _, count in sample["earlier"]), None
            if sample["earlier"]:
                start = _start_crc(sample["earlier"], sample["token_ids"][:begun], sample["logprobs"][:begun])
            at = sample["prompt_id"], sample["sample_index"]
            found.append(StoredResponse(path, offset, at, line["prompt_crc"], start))
    return found


class ResponseWriter:
    """Appends finished responses to one file a step. A written line survives the process.

    A disk error ends the writing, not the run.
    """

    def __init__(self, max_bytes: float):
        """At most `max_bytes` are written into steps that were not removed; responses beyond are not kept, with one
        warning.
        """
        self._max_bytes = max_bytes
        self._path: Path | None = None
        self._key: Mapping[str, Any] = {}
        self._file: BinaryIO | None = None
        self._sizes: dict[Path, int] = {}  # bytes of this writer in each step's directory
        self.has_failed = False
        self._is_full = False  # whether a response was left out

    def begin(self, path: Path, key: Mapping[str, Any]) -> None:
        """From now on responses go to `path`, which is created with the first of them."""
        self.end()
        self._path, self._key = path, key

    def add(self, sample: Sample, prompt_crc: int) -> None:
        """Appends a finished response, unless its environment failed: a restart tries again."""
        if self._path is None or self.has_failed or sample.failure is not None:
            return
        try:
            self._append(self._path, encode_response(sample, prompt_crc))
        except OSError as error:
            self.has_failed = True
            _log.warning("the rollout cache is off, a restart generates these responses again: %s", error)

    def _append(self, path: Path, data: bytes) -> None:
        if self._file is None:
            data = encode_line(self._key) + data
        if sum(self._sizes.values()) + len(data) > self._max_bytes:
            # Rank 0 removes what a checkpoint covers, for all writers.
            self._sizes = {step: size for step, size in self._sizes.items() if step.exists()}
        if sum(self._sizes.values()) + len(data) > self._max_bytes:
            if not self._is_full:
                gib, cache = self._max_bytes / 2**30, path.parent.parent
                _log.warning("%s has reached %.3g GiB: a restart generates the responses beyond them again", cache, gib)
            self._is_full = True
            return
        if self._file is None:
            self._file = _create_private(path)
        self._sizes[path.parent] = self._sizes.get(path.parent, 0) + len(data)
        with naming(path):
            self._file.write(data)
            self._file.flush()

    def end(self) -> None:
        """Closes the step's file. A second call does nothing."""
        if self._file is not None:
            with suppress(OSError):  # a full disk was reported at the write
                self._file.close()
        self._path, self._file = None, None


def _create_private(path: Path) -> BinaryIO:
    """A new file that only this user may read, in directories that only this user may enter."""
    for directory in (path.parent.parent, path.parent):  # `parents=True` would not make them private
        directory.mkdir(mode=0o700, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


class RolloutCache:
    """One rank's part; the first rank of a replica writes, all of them read. Disk errors do not end a run, but where a
    response that was there at the step's begin cannot be read any more.
    """

    def __init__(
        self,
        section: RolloutCacheSection,
        directory: Path,
        world: Ranks,
        backend: RolloutBackend,
        *,
        identity: Mapping[str, Any],
        tp: int,
        fresh: bool = False,
        max_bytes: float = ROLLOUT_CACHE_BYTES,
    ):
        """Keeps responses in `directory`, of one replica at most `max_bytes`; without keyed sampling in `backend`
        nothing is kept or reused.

        `identity`: settings on which a response depends, JSON-able. `fresh`: ignore old responses.
        """
        self._directory, self._world = directory, world
        self._backend = backend
        self.keeps = section.enabled and backend.capabilities.keyed_sampling
        self._identity, self._fresh = dict(identity), fresh
        self._replica = rollout_replica(world.rank, tp)
        self._is_first = is_first_of_engine(world.rank, tp)
        self._start_id = os.urandom(4).hex()
        self._writer: ResponseWriter | None = None
        if self._is_first and self.keeps:
            self._writer = ResponseWriter(max_bytes)
        if section.enabled and not self.keeps and world.is_main:
            _log.info("no rollout cache without keyed sampling: a restart generates an unfinished step again")
        self._old_steps: set[int] = set()  # steps with responses of earlier starts, seen by any rank
        self._stored: list[StoredResponse] = []  # of the present step, by earlier starts; the same on every rank
        self._key: dict[str, Any] = {}
        self._reused = 0

    def start(self, steps_done: int) -> None:
        """Removes what a checkpoint of `steps_done` steps covers, or all for a fresh run. Collective."""
        if not self.keeps:
            return
        self.remove_until(math.inf if self._fresh else steps_done)
        self._world.barrier()
        self._old_steps = set().union(*self._world.all_gather_object(set(self._steps())))

    @property
    def has_old_steps(self) -> bool:
        """Whether earlier starts have left responses, which this one may use."""
        return bool(self._old_steps)

    def reuse_line(self, found: int, total: int) -> str:
        """How many of `total` responses were `found`, for people."""
        if not found:
            return (
                f"uses none of the responses in {self._directory}, of other settings, weights or another version; "
                "they go once this command has ended"
            )
        return f"reuses {found} of {total} responses, which earlier starts have left in {self._directory}"

    def begin_step(self, step: int, policy_version: int, weights: str) -> None:
        """Begins the rollouts of `step` (1-based) with the `weights` of that fingerprint. Collective."""
        self._reused = 0
        if not self.keeps:
            return
        self._key = {**self._identity, "policy_version": policy_version, "weights": weights}
        directory = self._directory / f"step-{step:06d}"
        self._stored = self._scan(directory) if step in self._old_steps else []
        if self._writer is not None:
            name = f"replica-{self._replica:05d}-{self._start_id}.jsonl"
            self._writer.begin(directory / name, self._key)

    def _scan(self, directory: Path) -> list[StoredResponse]:
        """The responses of earlier starts in a step's directory that have the present key, the same list on every rank:
        each file is parsed by one of them. Collective.
        """
        own = set(directory.glob("replica-*.jsonl"))
        seen = self._world.all_gather_object(own)
        shared = set.intersection(*seen)
        if self._world.is_main and (lost := set.union(*seen) - shared):
            _log.warning("%d files in %s are not seen by every rank: not used", len(lost), directory)
        rows = []
        for path in sorted(shared)[self._world.rank :: self._world.size]:
            try:
                if (found := scan_responses(path, self._key, self._world.heartbeat)) is None:
                    _log.warning("%s has responses of other weights or settings: not used", path)
                rows += found or []
            except OSError as error:
                _log.warning("%s cannot be read, its responses are generated again: %s", path, error)
        self._world.wait_for_all()  # a rank's share of the files may take longer than a collective may
        parts = gather_large(self._world, rows or None)
        return sorted(chain.from_iterable(parts), key=lambda stored: (stored.path, stored.offset))

    def find(self, call: GenerateCall) -> Found:
        """The responses of earlier starts that `call` asks for and lacks, by prompt id and sample index, to the prompts
        of all replicas; `call.prompts` is a `PromptQueue`. The same on all ranks of an engine.
        """
        if not self._stored:
            return {}
        assert isinstance(call.prompts, PromptQueue)
        crcs = _crcs(call.prompts.prompts, call)
        found = {
            stored.at: stored
            for stored in self._stored
            if crcs.get(stored.at[0]) == stored.prompt_crc
            and stored.at[1] < call.num_samples
            and stored.at not in call.have
            and _continues(stored, call.begun.get(stored.at))
        }
        if self._world.is_main and found:
            _log.info("%d responses of this step were in the rollout cache", len(found))
        return found

    def generate(self, call: GenerateCall, found: Found | None = None) -> list[Sample]:
        """As the backend's `generate`, with cached responses in place of new ones; `call.prompts` is a `PromptQueue`.

        `found`: what `find` has returned for the call; None: it is called here. Raises OSError
        where one of these cannot be read any more.
        """
        if not self.keeps:
            return self._backend.generate(call)
        queue = call.prompts
        assert isinstance(queue, PromptQueue)
        found = self.find(call) if found is None else found
        on_response = self._writer_for(queue.prompts, call)
        made = self._backend.generate(replace(call, have={*call.have, *found}, on_response=on_response))
        fetched = {prompt.prompt_id for prompt in queue.fetched}
        reused = [stored.read() for (prompt_id, _), stored in found.items() if prompt_id in fetched]
        if call.on_response is not None:
            for sample in reused:
                call.on_response(sample)
        self._reused += len(reused)
        return sorted([*reused, *made], key=lambda s: (s.prompt_id, s.sample_index))

    def _writer_for(self, prompts: Sequence[Prompt], call: GenerateCall) -> Callable[[Sample], None] | None:
        """A callback that stores each finished response to `prompts` and calls the call's own; ranks that do not write
        store none.
        """
        also = call.on_response
        if (writer := self._writer) is None:
            return also
        crcs = _crcs(prompts, call)

        def store(sample: Sample) -> None:
            writer.add(sample, crcs[sample.prompt_id])
            if also is not None:
                also(sample)

        return store

    def end_step(self) -> RankMetrics:
        """After the step's last response; returns metrics of this rank."""
        if self._writer is None:
            return {}
        self._writer.end()
        return sums({"rollout_cache/reused": self._reused, "rollout_cache/disabled": self._writer.has_failed})

    def remove_until(self, step: float | None) -> None:
        """Removes the steps up to `step`, that of this run's newest complete checkpoint."""
        if self._world.is_main and self.keeps and step is not None:
            for number, directory in self._steps().items():
                if number <= step:
                    shutil.rmtree(directory, ignore_errors=True)

    def clear(self, step: float = math.inf) -> None:
        """Removes the steps up to `step`, the run's last one, where responses are kept. Collective."""
        if not self.keeps:
            return
        self.close()
        self._world.barrier()  # every file is closed
        self.remove_until(step)
        if self._world.is_main:
            with suppress(OSError):  # there was none, or it holds what the cache has not made
                self._directory.rmdir()

    def close(self) -> None:
        """Closes the step's file."""
        if self._writer is not None:
            self._writer.end()

    def _steps(self) -> dict[int, Path]:
        found = {path.name.removeprefix("step-"): path for path in sorted(self._directory.glob("step-*"))}
        return {int(name): path for name, path in found.items() if name.isdigit()}


def _start_crc(drawn: Iterable[Drawn], token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
    """CRC-32 of the part of a response that earlier steps drew: the policies, tokens and log-probs."""
    crc = zlib.crc32(np.asarray(tuple(drawn), "<i8").tobytes())
    return zlib.crc32(np.asarray(logprobs, "<f8").tobytes(), zlib.crc32(np.asarray(token_ids, "<i4").tobytes(), crc))


def _continues(stored: StoredResponse, begun: Sample | None) -> bool:
    """Whether a cached response begins with the tokens and log-probs that the call continues, of the same policies;
    without `begun` it must be new. The file's key names the policy that drew the others.
    """
    start = None if begun is None else _start_crc(begun.drawn_by, begun.token_ids, begun.logprobs)
    return stored.start_crc == start


def _crcs(prompts: Sequence[Prompt], call: GenerateCall) -> dict[int, int]:
    return {prompt.prompt_id: prompt_crc(prompt, call.turns is not None) for prompt in prompts}

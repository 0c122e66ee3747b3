"""The embedded backend: the rollout engine in the trainer's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_tlt.backends.base import BaseBackend
from megatron_tlt.errors import BackendError, CheckpointError, SyncError
from megatron_tlt.interfaces import CAPABILITIES
from megatron_tlt.rollout.drive import Drive
from megatron_tlt.rollout.hidden_states import HiddenStateCollector
from megatron_tlt.sync.buckets import checksum
from megatron_tlt.types import (
    EngineStats,
    GenerateCall,
    HiddenStateSample,
    Prompt,
    Sample,
    Trajectory,
    WeightBucket,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from megatron_tlt.rollout.engine import Engine
    from megatron_tlt.rollout.request import Request
    from megatron_tlt.rollout.speculation.history import ResponseHistory
    from megatron_tlt.sync.served_weights import ServedWeights

_SHOWN_TOKENS = 1000  # of a response, in `drafts_of`


class EmbeddedBackend(BaseBackend):
    """A `RolloutBackend` around one `Engine`. A weight sync is all or nothing (`sync.served_weights`)."""

    capabilities = CAPABILITIES["embedded"]

    def __init__(
        self,
        engine: Engine,
        weights: ServedWeights,
        history: ResponseHistory | None = None,
        release_cache: bool = False,
    ):
        """Without a version of `weights` the engine refuses to generate until a weight sync has arrived.

        `history` keeps earlier responses; by default their lengths. `release_cache` gives the cache's memory back
        whenever no rollout runs.
        """
        super().__init__(weights, history)
        self._release_cache = release_cache
        if release_cache:
            engine.release()
        self._traced_prompts = 0  # of each call
        self._traced_ids: set[int] = set()
        self._engine: Engine | None = engine

    @property
    def engine(self) -> Engine:
        """The engine. Raises BackendError after `close`."""
        if self._engine is None:
            raise BackendError("the rollout backend is closed")
        return self._engine

    def generate(self, call: GenerateCall) -> list[Sample]:
        engine = self.engine
        self._weights.check_ready()
        assert engine.is_idle, "generate is not re-entrant"
        self.resume()
        if engine.speculator is not None:
            engine.speculator.begin(call.drafts)
            if self._traced_prompts and call.until is None:  # else a pre-rollout's drafts would replace the step's
                call = self._traced(call)
        try:
            return Drive(engine, call, engine.runner.tp, self._sample).run()
        finally:
            if engine.speculator is not None:
                engine.speculator.end_generate()
            if self._release_cache:
                self.release()

    def _traced(self, call: GenerateCall) -> GenerateCall:
        """The call, of whose first prompts the drafts are kept."""

        def prompts() -> Iterator[Prompt]:
            for number, prompt in enumerate(call.prompts):
                if number < self._traced_prompts:
                    self._traced_ids.add(prompt.prompt_id)
                yield prompt

        return replace(call, prompts=prompts())

    def read_responses(
        self, responses: Sequence[Trajectory], seed: int, sink: Callable[[HiddenStateSample], None]
    ) -> None:
        """See `RolloutBackend.read_responses`."""
        engine = self.engine
        self._weights.check_ready()
        by_name = {(r.prompt_id, r.sample_index): r for r in responses}

        def take(sample: HiddenStateSample) -> None:
            drawn = sample.trajectory
            sink(replace(sample, trajectory=by_name[drawn.prompt_id, drawn.sample_index]))

        self.resume()
        self.collect_hidden_states(take)
        try:
            for response in responses:  # queued, they take far less memory than the states that `sink` gets
                engine.add_response(response, seed)
            while not engine.is_idle:
                engine.step()
        finally:
            engine.abort_all()
            self.collect_hidden_states(None)
            if self._release_cache:
                self.release()

    def release(self) -> None:
        """Gives the memory of KV cache, hidden states and graphs back until `resume`. A second call does nothing."""
        self.engine.release()

    def resume(self) -> None:
        """Allocates that memory again; does nothing without a `release` before it. `generate` calls it."""
        self.engine.resume()

    def running_lengths(self) -> np.ndarray:
        """Tokens that each running response has so far, int32 [B]."""
        rows = self.engine.scheduler.rows
        return rows.output_len[: rows.num_rows].copy()

    def collect_hidden_states(
        self,
        sink: Callable[[HiddenStateSample], None] | None,
        offer: Callable[[HiddenStateSample], bool] | None = None,
    ) -> None:
        collector = None if sink is None else HiddenStateCollector(sink, lambda: self._weights.version, offer)
        self.engine.collect_hidden_states(collector)

    def lookup_tables(self) -> tuple[Tensor, Tensor]:
        return self.engine.runner.decoder.lookup_tables()

    def begin_update(self, version: int) -> None:
        """Opens a weight sync of `version`; one that was open and never finished is given up."""
        assert self.engine.is_idle, "weights change only between rollouts"
        self._weights.begin(version)

    def update_weights(self, bucket: WeightBucket) -> None:
        """Loads some tensors of the open weight sync. Raises SyncError on a wrong version, name or shape."""
        tensors = self._weights.accept(bucket)
        self.engine.runner.decoder.load_weights(tensors, partial=True)
        if self._weights.keep_checksums:
            self._weights.open_checksums |= {name: checksum(tensor) for name, tensor in tensors}

    def update_drafter(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads the drafter's tensors into the open weight sync. Raises SyncError if none is open, there is no trained
        drafter in this engine, or tensors are not its own.
        """
        self._weights.require_open(f"a drafter of version {version}")
        speculator = self.engine.speculator
        if speculator is None or speculator.trained is None:
            raise SyncError(f"a drafter of version {version} came to an engine that has none")
        try:
            speculator.load_drafter(weights.items())
        except CheckpointError as error:
            raise SyncError(f"the drafter of version {version} does not fit: {error}") from error

    def finish_update(self) -> None:
        """Closes the weight sync; the engine serves the new version. Raises SyncError if a tensor has not come."""
        self._weights.commit()
        if self.engine.speculator is not None:
            self.engine.speculator.policy_changed()

    def take_stats(self) -> EngineStats:
        """Counters since the last call. Resets them."""
        return self.engine.take_stats()

    def close(self) -> None:
        """Drops the captured graphs, also where other references to the engine are left, and frees the engine with its
        weights and cache. A second call does nothing.
        """
        if self._engine is not None:
            self._engine.drop_graphs()
        self._engine = None

    def trace_drafts(self, num_prompts: int) -> None:
        self._traced_prompts, self._traced_ids = num_prompts, set()
        if self.engine.speculator is not None:
            self.engine.speculator.start_trace(self._traced_ids)

    def drafts_of(self, sample: Sample) -> dict[str, Any] | None:
        speculator = self.engine.speculator
        if speculator is None or speculator.trace is None:
            return None
        if not (runs := speculator.trace.runs(sample.prompt_id, sample.sample_index)):
            return None
        size = min(len(sample.token_ids), _SHOWN_TOKENS)
        text = self.engine.text_of_tokens
        return {
            "pieces": [text([token]) for token in sample.token_ids[:size]],
            "runs": [[at, min(ok, size - at), text(refused)] for at, ok, refused in runs if at < size],
            "since": min(size, sample.num_earlier),  # earlier steps' drafts are not kept
        }

    def _sample(self, request: Request) -> Sample:
        return request.sample(self.engine.text_of(request), self._weights.version)

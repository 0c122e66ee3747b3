"""`DrafterJob`: one `megatron-tlt drafter train`, from responses to a drafter directory, which can be stopped.

    OUT/unfinished/lock   the job that writes OUT
    OUT/unfinished/rollout_cache   responses that were generated, each as soon as it is finished
    OUT/unfinished/state.safetensors   weights, optimizer, measurements: once a minute, and at a signal

The same command goes on from the latter two. On a CPU in fp32 the drafter is then the same bits as of one that was
never stopped: hidden states of cached responses come from a prefill, which computes what decoding computed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.config.checks.files import note_maker
from megatron_tlt.config.drafter_kinds import SETTINGS
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.data.hashing import digest
from megatron_tlt.data.hub import hub_name
from megatron_tlt.data.prompts import build_prompts, held_out_prompts
from megatron_tlt.data.responses import read_responses
from megatron_tlt.drafters.state_file import drafter_state_writer, load_drafter_state
from megatron_tlt.drafters.training.pretrain import DrafterPretraining, held_out_params
from megatron_tlt.errors import CheckpointError, ConfigError, DataError, no_such_file
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.observe.files import replaced_file
from megatron_tlt.observe.progress import build_progress
from megatron_tlt.resilience.run_lock import lock_run_dir
from megatron_tlt.resilience.shutdown import GracefulShutdown
from megatron_tlt.trainer.job import Job, State
from megatron_tlt.trainer.models import open_backend, push_policy, tensor_parallel
from megatron_tlt.trainer.sampling import sampling_params
from megatron_tlt.trainer.setup import build_rollout_cache, open_tokenizer

if TYPE_CHECKING:
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.base import SavedDrafter
    from megatron_tlt.drafters.model import DrafterConfig
    from megatron_tlt.drafters.training.batching import DraftSequence
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.resilience.signals import StopSignals
    from megatron_tlt.types import GenerateCall, Prompt, Sample, SamplingParams, Trajectory

_STATE = "state.safetensors"
_TRAINING, _HELD_OUT = 1, 2  # "steps" of the rollout cache
_SAVE_EVERY_S = 60.0  # between two saves of the training state: a kill loses no more
_ROLLOUT = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "tp", "dtype")
_SHAPE = ("drafter", "draft_vocab_size", *SETTINGS)


class DrafterJob(Job):
    """Trains a drafter and writes OUT."""

    name = "drafter"
    config: Config

    def __init__(
        self,
        config: Config,
        world: World,
        out: Path,
        settings: Mapping[str, Any],
        start: Callable[[TensorParallel], tuple[DrafterPretraining, RolloutBackend]],
        signals: StopSignals,
    ):
        """`settings`: see `training_settings`; `start` opens the training and its engine. Collective.

        Raises ConfigError for responses that cannot be read and for an unfinished training with other settings, or a
        damaged one, RunDirectoryError if another job writes the same OUT.
        """
        self.config, self.world, self.num_steps = config, world, config.drafter.num_steps
        self._out = out
        self._lock = lock_run_dir("--out", str(out), self.state_dir, world)
        self._given = given_responses(config)
        self._prompts = training_prompts(config) if self._given is None else []
        self._held_out = held_out(config)
        read = read_settings(config, self._given, self._prompts, self._held_out) if world.is_main else {}
        self._settings = {**settings, **world.broadcast_object(read)}  # rank 0's: a run may still add responses
        self._found = None if config.checkpoint.resume == "never" else unfinished_state(out, self._settings)
        self._done_before = 0 if self._found is None else int(self._found["training"]["steps"])
        tp = tensor_parallel(world, config.rollout.tp)
        self._training, self._backend = start(tp)
        self._cache = build_rollout_cache(config, self.state_dir, world, open_tokenizer(config), self._backend)
        self.shutdown = GracefulShutdown(world, config.stop, signals, tp.largest)
        self._saved_at = time.monotonic()

    @property
    def state_dir(self) -> Path:
        return self._out / UNFINISHED

    @property
    def done(self) -> int:
        return max(self._done_before, self._training.steps_done)

    def saved(self) -> State | None:
        return self._found

    def mark_start(self) -> None:
        """Nothing: its one state is of the same settings."""

    def load(self, state: State | None) -> None:
        """The drafter goes on from `state` in `begin`, behind the responses."""

    def begin(self) -> bool:
        """Gives the engine the policy's weights; reads the responses, or generates those that the cache lacks."""
        self.world.enter("load")
        model, sync = self.config.model.path, self.config.sync
        self._weights = push_policy(model, self._backend, self.world, sync, self._cache.keeps)
        self.shutdown.sync_after_step()  # a signal may have come while everything was loaded
        self._cache.start(0)
        self.world.enter("drafter rollout")
        params = sampling_params(self.config)
        if self._given is not None:
            data = self._training.read(self._given)
        else:
            data = self._roll_out(_TRAINING, self._prompts, self.config.drafter.samples_per_prompt, params)
        tests = self._roll_out(_HELD_OUT, self._held_out, 1, held_out_params(params)) if self._held_out else []
        self.note(f"{sum(s.num_bases for s in data)} response tokens of this rank")
        self.shutdown.sync("train")
        self.progress = build_progress("auto", self.num_steps, self.world.rank)
        self._training.begin(data, tests, self.progress, self._found)
        self.shutdown.sync_after_step()
        return True

    def _roll_out(
        self, step: int, prompts: Sequence[Prompt], samples: int, params: SamplingParams
    ) -> list[DraftSequence]:
        """Responses with hidden states. Raises GracefulExit after a signal."""
        self._cache.begin_step(step, 0, self._weights)
        cut_short = False

        def generate(call: GenerateCall) -> list[Sample]:
            nonlocal cut_short
            made, cut_short = self.shutdown.interruptible(self._cache.generate, call)
            return made

        sequences = self._training.generate(prompts, samples, params, generate)
        self._cache.end_step()
        self.shutdown.sync("rollout", cut_short)
        return sequences

    def step(self) -> None:
        """One optimizer step, and a measurement where it is due."""
        self.world.enter("drafter train", self.done + 1)
        self._training.step()

    def state_dict(self) -> State:
        """Empty before `begin` has the responses, which the rollout cache keeps."""
        return self._training.state_dict()

    def save_if_due(self) -> None:
        """Once a minute; after the last step nothing is left to resume."""
        if self.done < self.num_steps and time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()
            self._saved_at = time.monotonic()

    def save(self) -> None:
        """Rank 0's state. Raises CheckpointError where it cannot be written."""
        if not (self.world.is_main and (state := self.state_dict())):
            return
        file = self.state_dir / _STATE
        try:
            with replaced_file(file) as scratch:
                drafter_state_writer({**state, "settings": self._settings})(scratch)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def finish(self) -> None:
        """Writes the drafter and removes what a stopped training would go on from."""
        if self.world.is_main:
            note_maker(self._out, "drafter train")
            self._training.save(self._out)
            self.remove_state()
            result = self._training.result
            print(result.table() if result.bases else "no held-out prompts (data.eval): not measured")
            print(f"wrote {self._out}", flush=True)
        self.world.barrier()

    def close(self) -> None:
        self._cache.close()
        self.shutdown.close()
        if self._lock is not None:
            self._lock.release()


def open_pretraining(
    config: Config, drafter: DrafterConfig, start: SavedDrafter | None, world: World, tp: TensorParallel
) -> tuple[DrafterPretraining, RolloutBackend]:
    """The training of `drafter`, from `start` if that is given, and its engine, still without weights. Collective.

    `config` is one without speculation.
    """
    backend = open_backend(config, world, open_tokenizer(config), tp, keep_layers=drafter.aux_layers)
    return DrafterPretraining(config, world, backend, sampling_params(config), drafter, start), backend


def training_settings(config: Config, drafter: Path | None, num_ranks: int) -> dict[str, Any]:
    """The settings by which a training is the same one, by name, JSON-able; see `read_settings`, too."""
    section = config.drafter.model_dump(mode="json", exclude={"online"})
    settings = {
        **{f"drafter.{name}": value for name, value in section.items()},
        **{f"rollout.{name}": getattr(config.rollout, name) for name in _ROLLOUT},
        **{f"rollout.speculation.{name}": getattr(config.rollout.speculation, name) for name in _SHAPE},
        "data": config.data.model_dump(mode="json"),
        "train.seed": config.train.seed,
        "--drafter": None if drafter is None else "@".join(hub_name(str(drafter)) or [str(drafter)]),
        "ranks": num_ranks,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def read_settings(
    config: Config, given: Sequence[Trajectory] | None, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> dict[str, str]:
    """Those that `training_settings` lacks: fingerprints of the policy, and of the rows that are read."""
    model = config.model
    rows = [digest(r.token_ids.tobytes(), r.response_start, r.given) for r in given or ()]
    return {
        "weights of model.path": base_fingerprint(model, ModelConfig.from_hf(model.path)),
        "rows of drafter.responses_path": digest(*rows),
        "rows of data.train": digest(*(p.token_ids for p in prompts)),
        "rows of data.eval": digest(*(p.token_ids for p in held_out)),
    }


def recorded_drafter(config: Config, out: Path) -> str | None:
    """`--drafter` of the training in OUT that goes on, a name with its commit; None where none goes on, or without."""
    file = out / UNFINISHED / _STATE
    if config.checkpoint.resume == "never" or not file.is_file():
        return None
    with suppress(CheckpointError):  # a damaged file is refused when it is read whole
        value: str | None = load_drafter_state(file, with_tensors=False)["settings"]["--drafter"]
        return value
    return None


def unfinished_state(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a training in OUT that was stopped; None where there is none.

    Raises ConfigError for one with other settings, and for a damaged file.
    """
    file = out / UNFINISHED / _STATE
    if not file.is_file():
        return None
    try:
        state = load_drafter_state(file)
    except CheckpointError as error:
        raise ConfigError.of("--out", str(out), f"{error}: remove {out / UNFINISHED} to begin again") from error
    old = state["settings"]
    names = [name for name in settings if name in old and old[name] != settings[name]]  # others are of another version
    if names:
        shown = ", ".join(f"{name} = {old[name]!r}, now {settings[name]!r}" for name in names)
        again = f"repeat its command with the same files, or remove {out / UNFINISHED}"
        allowed = f"holds an unfinished training with {shown}: {again}"
        raise ConfigError.of("--out", str(out), allowed)
    return state


def given_responses(config: Config) -> list[Trajectory] | None:
    """The responses in `drafter.responses_path`; None without it. Raises ConfigError where they cannot be read."""
    section = config.drafter
    if section.responses_path is None:
        return None
    path = Path(section.responses_path)
    if not path.exists():
        raise ConfigError.of("drafter.responses_path", str(path), no_such_file(path))
    vocab_size = ModelConfig.from_hf(config.model.path).vocab_size
    most = section.num_prompts * section.samples_per_prompt
    try:
        return read_responses(config, path, open_tokenizer(config), vocab_size, most)
    except DataError as error:
        raise ConfigError.of("drafter.responses_path", str(path), str(error)) from error


def training_prompts(config: Config) -> list[Prompt]:
    """The prompts to generate responses to."""
    stream = build_prompts(config.data, "train", open_tokenizer(config), config.train.seed)
    return stream.next_batch(config.drafter.num_prompts)


def held_out(config: Config) -> list[Prompt]:
    """The held-out prompts; none without `data.eval`."""
    return held_out_prompts(config.data, open_tokenizer(config), config.drafter.eval_prompts)

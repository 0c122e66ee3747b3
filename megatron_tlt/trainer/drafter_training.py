"""`DrafterJob`: one `megatron-tlt drafter train`, from responses to a drafter directory, which can be stopped.

    OUT/unfinished/rollout_cache   responses that were generated, each as soon as it is finished
    OUT/unfinished/state.safetensors   weights, optimizer, measurements: once a minute, and at a signal

The same command reads both and goes on. On a CPU in fp32 the drafter is then the same bits as of one that was never
stopped: hidden states of cached responses come from a prefill, which computes what decoding computed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.checks.files import note_maker
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.drafters.fingerprint import policy_fingerprint
from megatron_tlt.drafters.state_file import drafter_state_writer, load_drafter_state
from megatron_tlt.drafters.training.measure import MeasuredAcceptance
from megatron_tlt.drafters.training.pretrain import DrafterPretraining, held_out_params
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.loader import iter_weights
from megatron_tlt.observe.files import sync
from megatron_tlt.resilience.rollout_cache import RolloutCache, Weights
from megatron_tlt.resilience.shutdown import GracefulExit, GracefulShutdown
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer.chat_settings import write_config
from megatron_tlt.trainer.models import open_backend, tensor_parallel
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
_ROLLOUT = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "tp", "dtype")
_SHAPE = ("drafter", "layers", "draft_vocab_size", "block_size", "block_layers")


class DrafterJob:
    """One rank's part. Every method is collective."""

    def __init__(
        self,
        config: Config,
        world: World,
        out: Path,
        pretraining: DrafterPretraining,
        cache: RolloutCache,
        shutdown: GracefulShutdown,
        settings: Mapping[str, Any],
        state: Mapping[str, Any] | None,
    ):
        """`cache` is in OUT/unfinished. `settings` and `state`: see `training_settings` and `unfinished_state`."""
        self._config, self._world, self._out = config, world, out
        self._pretraining, self._cache, self._shutdown = pretraining, cache, shutdown
        self._settings, self._state = settings, state

    def run(
        self, prompts: Sequence[Prompt], given: Sequence[Trajectory] | None, held_out: Sequence[Prompt]
    ) -> bool:
        """Trains on responses to `prompts`, or on those that are `given`; writes OUT. Returns whether a signal stopped
        it; everything is then saved.
        """
        try:
            self._shutdown.sync_after_step()  # a signal may have come while everything was loaded
            self._make_directory()
            result = self._train(prompts, given, held_out)
        except GracefulExit:
            self._save_and_leave()
            return True
        finally:
            self._shutdown.close()
        if self._world.is_main:
            note_maker(self._out, "drafter train")
            self._pretraining.save(self._out, result)
            shutil.rmtree(self._out / UNFINISHED, ignore_errors=True)
            print(result.table() if result.bases else "no held-out prompts (data.eval): not measured")
            print(f"wrote {self._out}", flush=True)
        self._world.barrier()
        return False

    def _train(
        self, prompts: Sequence[Prompt], given: Sequence[Trajectory] | None, held_out: Sequence[Prompt]
    ) -> MeasuredAcceptance:
        self._cache.start(0)
        self._world.enter("drafter rollout")
        params = sampling_params(self._config)
        if given is not None:
            data = self._pretraining.read(given)
        else:
            data = self._roll_out(_TRAINING, prompts, self._config.drafter.samples_per_prompt, params)
        tests = self._roll_out(_HELD_OUT, held_out, 1, held_out_params(params)) if held_out else []
        if self._world.is_main:
            print(f"drafter {sum(s.num_bases for s in data)} response tokens of this rank", flush=True)
        self._shutdown.sync("train")
        check = self._shutdown.sync_after_step
        return self._pretraining.train(data, tests, self._state, check, self._save)

    def _roll_out(
        self, step: int, prompts: Sequence[Prompt], samples: int, params: SamplingParams
    ) -> list[DraftSequence]:
        """Responses with hidden states. Raises GracefulExit after a signal."""
        self._cache.begin_step(step, 0)
        cut_short = False

        def generate(call: GenerateCall) -> list[Sample]:
            nonlocal cut_short
            made, cut_short = self._shutdown.interruptible(self._cache.generate, call)
            return made

        sequences = self._pretraining.generate(prompts, samples, params, generate)
        self._cache.end_step()
        self._shutdown.sync("rollout", cut_short)
        return sequences

    def _make_directory(self) -> None:
        if self._world.is_main:
            (self._out / UNFINISHED).mkdir(mode=0o700, parents=True, exist_ok=True)
            write_config(self._config, self._out / UNFINISHED)
        self._world.barrier()

    def _save(self, state: Mapping[str, Any]) -> None:
        """Writes the training state; rank 0 only. Raises CheckpointError where it cannot be written."""
        file = self._out / UNFINISHED / _STATE
        scratch = file.with_name(f".{_STATE}")
        try:
            drafter_state_writer({**state, "settings": dict(self._settings)})(scratch)
            sync(scratch)
            os.replace(scratch, file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be written: {error}") from error

    def _save_and_leave(self) -> None:
        if self._world.is_main and self._pretraining.is_training:
            self._save(self._pretraining.state_dict())
        self._cache.close()
        if self._world.is_main:
            print(f"{self._shutdown.reason()}: saved in {self._out / UNFINISHED}, the same command goes on", flush=True)
        self._world.barrier()


def build_drafter_job(
    config: Config,
    plain: Config,
    drafter: DrafterConfig,
    start: SavedDrafter | None,
    world: World,
    out: Path,
    signals: StopSignals,
    settings: Mapping[str, Any],
    state: Mapping[str, Any] | None,
) -> DrafterJob:
    """One rank of the training of `drafter`, from `start` if that is given. Collective.

    `plain`: `config` without speculation. See `DrafterJob` for the rest.
    """
    tp = tensor_parallel(world, config.rollout.tp)
    caches: list[RolloutCache] = []

    def watch(weights: Weights, backend: RolloutBackend) -> Weights:
        caches.append(build_rollout_cache(config, out / UNFINISHED, world, open_tokenizer(config), backend))
        return caches[0].fingerprint(weights)

    pretraining, _ = open_pretraining(plain, drafter, start, world, tp, watch)
    shutdown = GracefulShutdown(world, config.stop, signals, tp.largest)
    return DrafterJob(config, world, out, pretraining, caches[0], shutdown, settings, state)


def open_pretraining(
    config: Config,
    drafter: DrafterConfig,
    start: SavedDrafter | None,
    world: World,
    tp: TensorParallel,
    watch: Callable[[Weights, RolloutBackend], Weights] = lambda weights, _: weights,
) -> tuple[DrafterPretraining, RolloutBackend]:
    """The training of `drafter`, and an engine with the model's weights, which pass through `watch`. Collective."""
    policy = ModelConfig.from_hf(config.model.path)
    backend = open_backend(config, world, open_tokenizer(config), tp, keep_layers=drafter.aux_layers)
    assert isinstance(backend, EmbeddedBackend), "config/checks requires it"
    world.enter("load")
    weights = watch(iter_weights(config.model.path, policy), backend)
    BucketedSync(config.sync, backend, world).push(weights, version=0)
    return DrafterPretraining(config, world, backend, sampling_params(config), drafter, start), backend


def training_settings(config: Config, drafter: Path | None, num_ranks: int) -> dict[str, Any]:
    """The settings by which a training is the same one, by name, JSON-able."""
    section = config.drafter.model_dump(mode="json", exclude={"online"})
    settings = {
        **{f"drafter.{name}": value for name, value in section.items()},
        **{f"rollout.{name}": getattr(config.rollout, name) for name in _ROLLOUT},
        **{f"rollout.speculation.{name}": getattr(config.rollout.speculation, name) for name in _SHAPE},
        "data": config.data.model_dump(mode="json"),
        "train.seed": config.train.seed,
        "model.path": policy_fingerprint(config.model.path),
        "--drafter": None if drafter is None else str(drafter),
        "ranks": num_ranks,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def unfinished_state(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a training in OUT that was stopped; None where there is none.

    Raises ConfigError for one with other settings, CheckpointError for a damaged file.
    """
    file = out / UNFINISHED / _STATE
    if not file.is_file():
        return None
    state = load_drafter_state(file)
    old = state["settings"]
    names = [name for name in settings if old.get(name) != settings[name]]
    if names:
        shown = ", ".join(f"{name} = {old.get(name)!r}, now {settings[name]!r}" for name in names)
        allowed = f"holds an unfinished training with {shown}: repeat its command, or remove {out / UNFINISHED}"
        raise ConfigError.of("--out", str(out), allowed)
    return state

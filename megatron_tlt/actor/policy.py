"""`MegatronPolicy`: the trained model, sharded over all ranks of the job.

Legend: R response tokens of a sequence.

One update, drawn for two mini-batches (every line is collective over the whole world):

    pack all mini-batches -> [reference log-probs] -> old log-probs of all -> for each mini-batch:
        zero gradients -> forward/backward (1F1B) -> sum over replicas -> norm -> clip -> optimizer step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tlt.actor.base_fingerprint import base_fingerprint
from megatron_tlt.actor.build import PolicyModel, kind_of_layers, packed_format
from megatron_tlt.actor.checkpoint import SaveHandle, load_model, load_policy, start_save
from megatron_tlt.actor.checkpoint_files import (
    Manifest,
    model_differences,
    model_record,
    read_manifest,
    step_of,
    training_record,
)
from megatron_tlt.actor.compat import HAS_CUDA, cpu_as_cuda, current_device
from megatron_tlt.actor.groups import ActorGroups
from megatron_tlt.actor.hidden_states import ForwardStateCollector, Sink
from megatron_tlt.actor.lora import factor_reader, finalize_gradients
from megatron_tlt.actor.metrics import merge, per_token, reduce_over_world
from megatron_tlt.actor.microbatch import (
    MicroBatch,
    RowLayout,
    filler,
    num_tokens,
    pack_micro_batches,
    row_multiple,
    scatter,
    with_routing,
)
from megatron_tlt.actor.offload import OptimizerOffload
from megatron_tlt.actor.optimizer import (
    OptimizerStep,
    build_optimizer,
    ddp_config,
    gather_parameters,
    guarded_step,
    wrap_data_parallel,
)
from megatron_tlt.actor.routing import Routing, routing_metrics
from megatron_tlt.actor.train_step import PolicyLoss, Scored, accumulate_gradients, forward_logprobs
from megatron_tlt.actor.weights import load_weights, named_tensors, value_of
from megatron_tlt.config.actor import ActorSection, OptimizerSection
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.world import World
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.decoders.base import DTYPES
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import weight_reader
from megatron_tlt.observe.log import announced
from megatron_tlt.types import TrainBatch, TrainOutput, TrainSequence

_log = logging.getLogger(__name__)


class MegatronPolicy:
    """A policy on megatron-core: updates, log-probs, export, checkpoints. All methods are collective."""

    def __init__(
        self,
        world: World,
        model: ModelSection,
        actor: ActorSection,
        optimizer: OptimizerSection,
        loss: PolicyLoss,
        total_optimizer_steps: int,
        keep_reference: bool = False,
        teacher: str | None = None,
        seed: int = 0,
    ):
        """Builds this rank's shards and loads `model.path`, or `model.megatron_path` if it is set.

        `total_optimizer_steps` is the length of the learning-rate schedule; `keep_reference` keeps a frozen
        copy of the starting weights for KL terms, with LoRA those that there are, or in their place the model in the
        directory `teacher`, in the same layout and type; `seed` is that of new adapters. Raises ConfigError,
        CheckpointError.
        """
        # cuDNN's attention builds a plan for each new number and length of sequences, and a step has hundreds.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.world, self.actor, self.optimizer_section, self.loss = world, actor, optimizer, loss
        self._seed = seed
        self.dims = Dims.fit(world.size, actor.tp, actor.pp, actor.cp, actor.ep)
        self.config = ModelConfig.from_hf(model.path)
        self._base = ""
        if actor.lora is not None:  # read by one rank: of `model.megatron_path` it is three layers
            self._base = world.broadcast_object(base_fingerprint(model, self.config) if world.is_main else None)
        self.shards_optimizer = actor.shards_optimizer(optimizer, HAS_CUDA)
        self.groups = ActorGroups.create(world, self.dims)
        if world.device.type == "cuda":
            _log.info("layers of the actor (actor.layer_spec = %s): %s", actor.layer_spec, kind_of_layers(actor))
        self.total_optimizer_steps = total_optimizer_steps
        self.policy_version = 0
        self._has_compiled = world.device.type != "cuda"
        # Attempted ones, skipped ones included: the position on the learning-rate schedule.
        self.optimizer_steps = 0
        self.has_stepped = optimizer.name == "sgd"
        """Whether an update was ever applied: before, a checkpoint of Adam could not be loaded again."""
        self.model = self._build(model, self.config, actor)
        self._keeps_reference = keep_reference
        self._reference: PolicyModel | None = None
        if teacher is not None:
            section = ModelSection(path=teacher, max_context=model.max_context)
            plain = actor.model_copy(update={"lora": None})
            self._reference = _frozen(self._build(section, ModelConfig.from_hf(teacher), plain))
        elif keep_reference and actor.lora is None:
            self._reference = _frozen(self._build(model, self.config, actor))
        self.ddp = wrap_data_parallel(
            self.model.module, ddp_config(actor, self.shards_optimizer, self.dims.dp * self.dims.cp)
        )
        self.optimizer = build_optimizer(self.ddp, optimizer, actor)
        self.model.megatron_config.finalize_model_grads_func = finalize_gradients
        self._offload = OptimizerOffload(self.ddp, self.optimizer)
        if actor.offload_optimizer:
            self._offload.offload()

    def _build(self, model: ModelSection, config: ModelConfig, actor: ActorSection) -> PolicyModel:
        """This rank's shards of a model, with its starting weights. Collective. Raises CheckpointError.

        Phase "load", with a sign of life a tensor: all replicas read all weights, from a file system that may be slow.
        """
        self.world.enter("load")
        built = PolicyModel(config, actor, self.groups, model.max_context)
        built.on_forward = self.world.heartbeat
        if model.megatron_path is not None:
            load_model(self.world, built.module, self.groups, model.megatron_path, config)
        else:
            read = weight_reader(model.path, config)
            load_weights(built.module, config, self.groups, read, on_tensor=self.world.heartbeat)
        if actor.lora is not None:
            factors = factor_reader(actor.lora, config, built.adapters, self._seed)
            load_weights(built.module, config, self.groups, factors, built.adapters, on_tensor=self.world.heartbeat)
        self.world.wait_for_all()  # a host may read for longer than a collective may take
        return built

    def communicating(self) -> list[dist.ProcessGroup]:
        return self.groups.communicating(self.config.num_experts > 0, self.shards_optimizer)

    # ---- updates

    def train_step(self, batch: TrainBatch) -> TrainOutput:
        """One optimizer step per mini-batch.

        The gradient of each is exactly d/dw [sum of loss sums over all replicas / denominator], however the
        sequences are split over replicas and micro-batches. A step whose gradient norm is not finite is
        skipped. Mutates weights, optimizer, schedule; `policy_version` grows by one unless every step was
        skipped. Without a trained token there is nothing but the schedule's position, as after any step.
        """
        if not any(batch.denominators):
            self.optimizer_steps += len(batch.denominators)
            return TrainOutput(self.policy_version, {"empty_step": 1.0}, skipped=True)
        packed = [self._for_update(sequences) for sequences in batch.mini_batches]
        results, sums = [], []
        with self._first_update(), self._collecting([s for sequences in batch.mini_batches for s in sequences]):
            scored = [self._score(batches, batch.temperature, len(packed) > 1) for batches in packed]
            with self._offload.on_device():
                for batches, denominator in zip(scored, batch.denominators, strict=True):
                    result, step_sums = self._optimizer_step(batches, denominator, batch.temperature)
                    results.append(result)
                    sums.append(step_sums)
                gather_parameters(self.ddp)
        applied = any(result.applied for result in results)
        pairs = zip(sums, batch.denominators, strict=True)
        objectives = [s.get("loss", 0.0) / d for s, d in pairs if d > 0]  # of mini-batches with trained tokens
        self.policy_version += int(applied)
        metrics = self._report(results, sums, objectives) | self._routing_metrics(packed)
        return TrainOutput(self.policy_version, metrics, skipped=not applied)

    def _first_update(self) -> AbstractContextManager[object]:
        """Around the first update on a GPU, in which Megatron's fused functions are compiled."""
        if self._has_compiled:
            return nullcontext()
        self._has_compiled = True
        return announced("first update", "compiles Megatron's fused functions, up to a minute more than later ones")

    def _score(self, batches: list[MicroBatch], temperature: float, needs_old: bool) -> list[Scored]:
        """Adds the reference's log-probs if the loss reads them, and those of the weights before the update."""
        reference = None
        if self._keeps_reference and not getattr(self.loss, "needs_token_kl", False):  # of the reward: the caller's
            with self._as_reference() as model:
                reference = forward_logprobs(model, _for_routers_of(model, batches), temperature)
        old = forward_logprobs(self.model, batches, temperature) if needs_old else None
        none: list[None] = [None] * len(batches)  # also on the stages before the last
        return [Scored(*item) for item in zip(batches, old or none, reference or none, strict=True)]

    @contextmanager
    def _as_reference(self) -> Iterator[PolicyModel]:
        """The reference policy: a copy of the starting weights, the teacher, or the policy with its adapters off
        meanwhile.
        """
        assert self._keeps_reference, "built without keep_reference"
        with self.model.as_base() if self._reference is None else nullcontext():
            yield self._reference or self.model

    def _optimizer_step(
        self, batches: list[Scored], denominator: float, temperature: float
    ) -> tuple[OptimizerStep, dict[str, float]]:
        lr = self.optimizer_section.rate.at(self.optimizer_steps, self.total_optimizer_steps)
        self.optimizer_steps += 1
        if denominator <= 0:  # no token of any replica is trained: momentum and decay must not act either
            return OptimizerStep(applied=False, lr=lr), {}
        with cpu_as_cuda():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
        parts = accumulate_gradients(self.model, self.ddp, batches, self.loss, denominator, temperature)
        sums = reduce_over_world(parts, self.dims, self.world)
        result = guarded_step(self.optimizer, self.optimizer_section, lr)
        self.has_stepped |= result.applied
        if not result.applied and self.world.is_main:
            _log.warning("update skipped: its gradient norm is %s", result.grad_norm)
        return result, sums

    def _report(
        self, results: list[OptimizerStep], sums: list[dict[str, float]], objectives: list[float]
    ) -> dict[str, float]:
        """Per-token means over the tokens of all mini-batches' sequences, which there may be none of; `loss`,
        `grad_norm` and `grad_clipped` are means over the mini-batches with `objectives`, which were differentiated."""
        steps = max(1, len(objectives))
        return {
            "tokens": 0.0,
            **per_token(merge(sums)),
            "loss": sum(objectives) / steps,
            "grad_norm": sum(r.grad_norm for r in results) / steps,
            "grad_clipped": sum(r.clipped for r in results) / steps,
            "lr": results[-1].lr if results else 0.0,
            "optimizer_steps": float(sum(r.applied for r in results)),
            "skipped_steps": float(sum(not r.applied for r in results)),
        }

    # ---- log-probs

    def logprobs(
        self,
        sequences: list[TrainSequence],
        temperature: float,
        which: Literal["policy", "reference"] = "policy",
    ) -> list[np.ndarray]:
        """log softmax(logits / temperature) of every response token, [R] fp32 per sequence.

        In the order of `sequences`. All ranks of a replica pass the same ones and get the same arrays. Collective over
        the replica, and with expert parallel over the world.
        Mutates nothing.
        """
        batches = self._pack(sequences)
        if self.config.num_experts:
            replay = which == "policy" and self._replays
            batches = [with_routing(batch, replay) for batch in batches]
        is_policy = which == "policy"
        collecting = self._collecting(sequences) if is_policy else nullcontext()
        with nullcontext(self.model) if is_policy else self._as_reference() as model, collecting:
            found = forward_logprobs(model, self._as_many_as_others(batches), temperature)[: len(batches)]
        sizes = [batch.labels.shape[0] for batch in batches]
        flat = torch.cat(found) if found else torch.empty(sum(sizes), device=current_device())
        if self.dims.pp > 1 and batches:
            dist.broadcast(flat, src=self.groups.pipeline[-1], group=self.groups.pp)
        by_batch = [part.cpu().numpy() for part in flat.split(sizes)] if batches else []
        return scatter(by_batch, batches, len(sequences))

    def _for_update(self, sequences: list[TrainSequence]) -> list[MicroBatch]:
        """At least one micro-batch; with experts as many as every other rank has. Collective with experts."""
        batches = self._pack(sequences) or [self._filler()]
        if not self.config.num_experts:
            return batches
        weight = 0.0
        if self.actor.has_router_losses:
            rows = torch.tensor(float(sum(map(num_tokens, batches))), device=current_device())
            dist.all_reduce(rows)  # every rank of a replica has them
            weight = self.dims.tp * self.dims.pp * self.dims.cp / max(1.0, float(rows))
        return [with_routing(batch, self._replays, weight) for batch in self._as_many_as_others(batches)]

    def _as_many_as_others(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """With expert parallel, fillers up to the most that a rank has: each pass through a layer needs all of them."""
        if self.dims.ep == 1:
            return batches
        count = torch.tensor(len(batches), device=current_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return batches + [with_routing(self._filler())] * (int(count) - len(batches))

    def _filler(self) -> MicroBatch:
        return filler(self._row_layout)

    @property
    def _replays(self) -> bool:
        return self.actor.router_replay == "rollout"

    def _routing_metrics(self, packed: list[list[MicroBatch]]) -> dict[str, float]:
        """Metrics of the routers over the whole update; none of a dense model. Collective with experts."""
        if not self.config.num_experts:
            return {}
        found = [batch.routing for batches in packed for batch in batches if isinstance(batch.routing, Routing)]
        layers = len(self.config.moe_layers)
        config = self.config
        return routing_metrics(found, layers, config.num_experts, config.num_experts_per_tok, self._replays)

    def _pack(self, sequences: list[TrainSequence]) -> list[MicroBatch]:
        return pack_micro_batches(sequences, self.actor.micro_batch_tokens, self._row_layout)

    @property
    def _row_layout(self) -> RowLayout:
        dims, device = self.dims, current_device()
        multiple = row_multiple(DTYPES[self.actor.dtype], device)
        return RowLayout(device, packed_format(self.actor), dims.tp, dims.cp, self.groups.at.cp, multiple)

    # ---- hidden states

    def collect_hidden_states(
        self, sink: Sink, budget_bytes: int, dtype: torch.dtype, layers: Sequence[int] = (), seed: int = 0
    ) -> None:
        """Calls `sink` with the hidden states of each step's responses from now on; see
        `ForwardStateCollector`. To be called once.
        """
        assert self.model.collector is None
        self.model.collector = ForwardStateCollector(
            self.model.module, self.groups, sink, budget_bytes, dtype, layers, seed
        )

    def _collecting(self, sequences: Sequence[TrainSequence]) -> AbstractContextManager[None]:
        collector = self.model.collector
        return nullcontext() if collector is None else collector.collecting(sequences, self.policy_version)

    # ---- weights

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every full tensor under its Hugging Face name, in one order on every rank; one in memory at a time.

        These are the weights that an engine serves, which need not be parameters. A tensor may be a view of the live
        weights: read it before the next step, do not write to it.
        """
        return named_tensors(self.model.module, self.config, self.groups, value_of)

    # ---- checkpoints

    def start_save(
        self,
        directory: Path,
        extra: dict[str, Any],
        keep: int | None = None,
        files: Mapping[str, Callable[[Path], None]] | None = None,
    ) -> SaveHandle:
        """Begins to save into `directory` (see `step_directory`); training may go on at once.

        `extra` is JSON-able state of the caller (rank 0's is kept). `keep` removes all but so many newest
        checkpoints once this one is complete. `files`: more files of the checkpoint, by name; this rank's writer
        thread calls each value with the path to write. All ranks must `poll` or `wait` on the handle before
        the next save.
        """
        manifest = Manifest(
            step=step_of(directory),
            policy_version=self.policy_version,
            optimizer_steps=self.optimizer_steps,
            layout=asdict(self.dims),
            model=model_record(self.config),
            training=self._training_record(),
            extra=extra,
        )
        return start_save(
            self.world,
            self.model.module,
            self.optimizer,
            self.groups,
            directory,
            manifest,
            keep,
            files or {},
            self._offload.values_of,
        )

    def load(self, directory: Path) -> dict[str, Any]:
        """Takes weights, optimizer and schedule position from a checkpoint of any layout.

        Returns its `extra`. The frozen reference stays what it is. Raises CheckpointError if the checkpoint
        is of another model, precision or optimizer. Damage is found by `find_checkpoint`, not here.
        """
        manifest = read_manifest(directory)
        expected = {**model_record(self.config), **self._training_record()}
        if wrong := model_differences({**manifest.model, **manifest.training}, expected):
            raise CheckpointError(f"checkpoint {directory} does not fit this run: {'; '.join(wrong)}")
        with self._offload.on_device(gradients=False):
            load_policy(self.world, self.model.module, self.optimizer, self.groups, directory)
        self.policy_version, self.optimizer_steps = manifest.policy_version, manifest.optimizer_steps
        self.has_stepped = True
        return manifest.extra

    def _training_record(self) -> dict[str, str]:
        return training_record(self.actor, self.optimizer_section.name, self.shards_optimizer, self._base)


def _for_routers_of(model: PolicyModel, batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches for the routers of `model`, if it has any, which choose for themselves."""
    return [with_routing(batch) for batch in batches] if model.config.num_experts else batches


def _frozen(model: PolicyModel) -> PolicyModel:
    model.module.requires_grad_(False)
    model.module.eval()
    return model

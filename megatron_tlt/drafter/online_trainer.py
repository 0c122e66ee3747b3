"""`OnlineDrafterTrainer`: trains the drafter on one rank while slower ranks roll out, and merges the ranks' drafters.

    begin_step(version)                    a rollout by this policy begins; hidden states come in by `buffer.add`
    train_step() train_step() ...          this rank alone, or with its tensor-parallel group; bounded by tokens
    merge(...)                             all ranks: one drafter again, or none if no rank trained
    weights()                              to the engines, behind the policy's own

A *window* is the time from one merge to the next. Legend: R ranks, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.distributed.tensor_parallel import SingleRank, TensorParallel
from megatron_tlt.drafter.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafter.buffer import HiddenStateBuffer
from megatron_tlt.drafter.flat_state import KINDS, FlatState
from megatron_tlt.drafter.fp8 import use_fp8
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.errors import CheckpointError, DrafterError
from megatron_tlt.models.eagle.model import EagleModel, check_eagle_tensors

_MIB = 1 << 20
_START_WIDTH = 128  # hidden size up to which `online.start_lr` is taken as it is
_MEAN_START = 9  # the mean's decay is 0.1 after the first step of a run, 0.9 after 81: it forgets its start


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The same on every rank."""

    tokens: tuple[int, ...]  # by rank, trained on since the last merge
    disabled: tuple[int, ...]  # ranks whose training had failed before
    rolled_back: bool  # a mean was not finite: training is over on all ranks


class OnlineDrafterTrainer:
    """One rank's drafter in training. Between merges replicas differ; the ranks of a tensor-parallel group never do.

    A rank that fails goes back to where the window began, contributes nothing, and trains no more.
    """

    def __init__(
        self,
        model: EagleModel,
        section: DrafterSection,
        *,
        temperature: float = 1.0,
        tp: TensorParallel | None = None,
        device: torch.device | str = "cpu",
        fingerprint: Mapping[str, str] | None = None,
    ):
        """`model` (all of it, no shard) has the starting drafter's weights and is on `device`; the trainer owns it and
        replaces its linears for `section.online.fp8`: ConfigError where that is not available. `fingerprint`, of the
        policy that the run starts from, is kept in checkpoints.
        """
        online = section.online
        self.model, self._device, self._tp = model, torch.device(device), tp or SingleRank()
        self._tokens, self._draft_steps = online.micro_step_tokens, online.draft_steps
        start_lr = online.start_lr * min(1.0, _START_WIDTH / model.config.hidden_size)
        self._extra_lr = max(0.0, start_lr / online.lr - 1.0)  # of a useless drafter, over lr
        self._decay, self._fingerprint = online.mean_decay, dict(fingerprint or {})
        window = min(section.window, online.micro_step_tokens)
        self.buffer = HiddenStateBuffer(int(online.buffer_mib * _MIB), window, online.max_age, section.seed)
        # Copies of the policy's embedding and LM head by version, for as long as there are hidden states of it: a push
        # overwrites the engine's own, and hidden states belong to the head that they were made for.
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._table_dtype = torch.float32 if section.dtype == "fp32" else None
        precision = nullcontext if online.fp8 == "off" else use_fp8(model, online.fp8, self._device)
        names = ("lr", "warmup_steps", "weight_decay", "clip_grad", "draft_steps")
        options = {"schedule": "constant", **{name: getattr(online, name) for name in names}}
        empty, noise = torch.empty(0, 0, device=self._device), online.hidden_state_noise
        self._trainer = DrafterTrainer(
            model, empty, empty, section.model_copy(update=options), temperature, None, precision, noise
        )
        self._state = FlatState(model, self._trainer.optimizer)
        self._before: tuple[Tensor, int, int] | None = None  # state where the window began, once it changed
        self.version = 0  # merges that changed the drafter
        self.window_tokens = 0  # answer tokens this rank has trained on since the last merge
        self.trained_tokens = 0  # the same of all ranks, up to the last merge
        self.failure: str | None = None  # why this rank trains no more

    @property
    def enabled(self) -> bool:
        """Whether this rank still trains."""
        return self.failure is None

    @property
    def trained_steps(self) -> int:
        """Optimizer steps behind the present weights: the most of any replica, summed over windows."""
        return self._trainer.trained_steps

    # -- a window -------------------------------------------------------------------------------------------

    def set_tables(self, version: int, embed: Tensor, head: Tensor) -> None:
        """Copies the policy's embedding and LM head [V, H] of `version`, tied ones once. Once a version, before it
        rolls out."""
        tied = head.data_ptr() == embed.data_ptr() and head.shape == embed.shape
        copies = [
            table.detach().to(self._device, self._table_dtype or table.dtype, copy=True)
            for table in ([embed] if tied else [embed, head])
        ]
        self.tables[version] = (copies[0], copies[-1])

    def begin_step(self, policy_version: int) -> None:
        """A rollout by `policy_version` begins: drops answers that are too old, and their tables."""
        self.buffer.begin_step(policy_version)
        needed = {policy_version, *self.buffer.versions()}
        self.tables = {version: pair for version, pair in self.tables.items() if version in needed}

    def train_step(self) -> dict[str, float] | None:
        """One micro-step; None if there is nothing to train on. All ranks of a tensor-parallel group call it together.

        Raises DrafterError if the gradient is not finite, or memory ran out, on any rank of the group: the
        drafter is then what it was when the window began, and `train_step` returns None from then on.
        """
        if not self.enabled:
            return None
        sample = self.buffer.sample(self._tokens * self._tp.size, self.tables.__contains__)
        if sample is None:
            return None
        try:
            metrics = self._learn(sample)
        except DrafterError as error:
            self.disable(str(error))
            raise
        # Own share only: the shares of a group's ranks add up to what their one drafter was trained on.
        self.window_tokens += sum(s.num_bases for s in self._share(sample))
        return metrics

    def disable(self, reason: str) -> None:
        """Ends training on this rank: the drafter is again what it was when the window began."""
        self.failure = reason
        self.drop_window()

    def _share(self, sample: list[DraftSequence]) -> list[DraftSequence]:
        return sample[self._tp.rank :: self._tp.size]

    def _learn(self, sample: list[DraftSequence]) -> dict[str, float]:
        version = sample[0].policy_version
        self._trainer.set_policy(*self.tables[version])
        metrics = self._gradient(sample)
        with _memory_errors("the drafter's optimizer step"):
            metrics |= self._trainer.apply(1.0 + self._extra_lr * (1.0 - metrics["accept/1"]))
        self._state.update_mean(min(self._decay, self.trained_steps / (self.trained_steps + _MEAN_START)))
        return {**metrics, "policy_version": float(version)}

    def _gradient(self, sample: list[DraftSequence]) -> dict[str, float]:
        """Gradient of the whole sample in `grad`, summed over the tensor-parallel group; metrics likewise."""
        share, counts = self._share(sample), bases_by_step(sample, self._draft_steps)
        steps = range(1, self._draft_steps + 1)
        names = ["loss", "tokens", *(f"{kind}/{j}" for kind in ("hidden", "ce", "accept") for j in steps)]
        metrics: dict[str, float] = dict.fromkeys(names, 0.0)
        failure: DrafterError | None = None
        self._trainer.optimizer.zero_grad(set_to_none=True)
        try:
            with _memory_errors(f"a drafter micro-step of {self._tokens} tokens"):
                if self._before is None:
                    self._before = (self._state.read(), self._state.steps, self.trained_steps)
                if share:
                    metrics |= self._trainer.backward(collate(share, self._device), counts)
        except DrafterError as error:
            failure = error
        if self._tp.size > 1:  # a rank that failed takes part, too: the others wait for it
            metrics = self._sum_over_group(metrics, failure is not None)
        if failure is not None:
            raise failure
        return metrics

    def _sum_over_group(self, metrics: dict[str, float], failed: bool) -> dict[str, float]:
        """Sums gradients and metrics over the group; NaN everywhere if any rank failed."""
        parameters = list(self.model.parameters())
        values = torch.tensor(list(metrics.values()), device=self._device)
        none = torch.zeros((), device=self._device)
        parts = [none.expand(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters]
        flat = torch.cat([values, *parts])
        if failed:
            flat.fill_(math.nan)
        self._tp.all_reduce(flat)
        summed, *gradients = flat.split([len(values), *(p.numel() for p in parameters)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return dict(zip(metrics, summed.tolist(), strict=True))

    # -- between windows ------------------------------------------------------------------------------------

    def merge(self, all_reduce: Callable[[Tensor], None], rank: int = 0, size: int = 1) -> MergeReport:
        """Makes one drafter of all ranks' again: all of the state is means, weighted by the tokens trained on.

        Collective over the `size` ranks; `all_reduce` sums over them in place, with the same bits on every rank (two
        calls; one if no rank trained, and then nothing changes). Afterwards all ranks hold the same bits. If a mean is
        not finite, all ranks go back to where the window began and train no more.
        """
        state, mine = self._state, self.window_tokens
        table = torch.zeros(size, 4, dtype=torch.float64, device=self._device)  # each rank fills its row
        table[rank] = torch.tensor([mine, state.steps, self.trained_steps, not self.enabled])
        all_reduce(table)
        tokens, steps, trained, disabled = ([int(x) for x in column] for column in table.T.tolist())
        total, rolled_back = sum(tokens), False
        if total:
            merged = state.weighted(mine / total)
            all_reduce(merged)
            rolled_back = not bool(torch.isfinite(merged).all())
            if rolled_back:
                self.disable(self.failure or "the mean of the replicas' drafters was not finite")
            else:
                state.write(merged)
                state.steps, self._trainer.trained_steps = max(steps), max(trained)
                self.version += 1
                self.trained_tokens += total
        self._before, self.window_tokens = None, 0
        failed = tuple(r for r, is_disabled in enumerate(disabled) if is_disabled)
        return MergeReport(tuple(tokens), failed, rolled_back)

    def drop_window(self) -> None:
        """This rank's drafter is again what it was when the window began."""
        if self._before is not None:
            flat, self._state.steps, self._trainer.trained_steps = self._before
            self._state.write(flat)
        self._before, self.window_tokens = None, 0

    def weights(self) -> dict[str, Tensor]:
        """The merged drafter under the names of `eagle_parameter_shapes`, not copied; never embedding or LM head.

        It is the running mean of the weights in training (`drafter.online.mean_decay`).
        """
        return self._state.mean()

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Drafter, moments, versions and counters: tensors (not copied) and JSON-able values.

        Not the buffer's data, and not a failure: a resumed run tries again.

        Only between merge and the next micro-step: before a merge, ranks have no common state. Else DrafterError.
        """
        if self._before is not None:
            raise DrafterError("the drafter can be saved after a merge only: replicas differ before it")
        return {
            **self._state.named(),
            "trained_steps": self.trained_steps,
            "version": self.version,
            "trained_tokens": self.trained_tokens,
            "buffer": self.buffer.metrics(),
            "policy_fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned. Raises CheckpointError if its tensors do not fit this drafter."""
        for kind in KINDS:
            if kind not in state:
                raise CheckpointError(f"the drafter's state has no {kind!r}")
            check_eagle_tensors(state[kind], self.model.config)
        self._state.load(state)
        self._trainer.trained_steps = int(state["trained_steps"])
        self.version, self.trained_tokens = int(state["version"]), int(state["trained_tokens"])
        self.buffer.load_counters(state["buffer"])
        self._before, self.window_tokens = None, 0


@contextmanager
def _memory_errors(where: str) -> Iterator[None]:
    """Running out of memory becomes a DrafterError; any other error passes."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise DrafterError(f"out of memory in {where}: {error}") from error
        raise

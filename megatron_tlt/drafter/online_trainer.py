"""`OnlineDrafterTrainer`: trains the drafter on one rank while slower ranks roll out, and merges the ranks' drafters.

    begin_step(version)                    the rollout's policy; features come in by `buffer.add`
    train_step() train_step() ...               this rank alone, or with its TP group as one unit; bounded by tokens
    merge(...)                             all ranks: one drafter again, or none if nobody trained
    weights()                              to the engines, behind the policy's own

Legend: P parameters, R ranks, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.distributed.tensor_parallel import SingleRank, TensorParallel
from megatron_tlt.drafter.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafter.buffer import HiddenStateBuffer
from megatron_tlt.drafter.flat_state import FlatState
from megatron_tlt.drafter.fp8 import use_fp8
from megatron_tlt.drafter.merging import MergeReport, RankWindow, exchange_windows, merge_states
from megatron_tlt.drafter.tables import PolicyTables
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.errors import CheckpointError, DrafterError
from megatron_tlt.models.eagle.model import EagleModel, check_eagle_tensors

_MIB = 1 << 20
_MEAN_START = 9  # the mean's decay is 0.1 after the first step of a run, 0.9 after 81


class OnlineDrafterTrainer:
    """One rank's drafter in training. Between merges replicas differ; the ranks of a unit never do.

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
    ):
        """`model` (all of it, no shard) has the starting drafter's weights and is on `device`; it becomes the
        trainer's. Its linears are replaced if `section.online.fp8` asks for it: ConfigError if that is not to be had.
        """
        online = section.online
        self.model, self._device, self._tp = model, torch.device(device), tp or SingleRank()
        self.micro_step_tokens, self._draft_steps = online.micro_step_tokens, online.draft_steps
        self._decay = online.mean_decay
        piece = min(section.window, online.micro_step_tokens)
        self.buffer = HiddenStateBuffer(int(online.buffer_mib * _MIB), piece, online.max_age, section.seed)
        self.tables = PolicyTables(self._device, torch.float32 if section.dtype == "fp32" else None)
        precision = nullcontext if online.fp8 == "off" else use_fp8(model, online.fp8, self._device)
        empty = torch.empty(0, 0, device=self._device)
        options = _options(section)
        self._trainer = DrafterTrainer(
            model,
            empty,
            empty,
            options,
            temperature,
            precision=precision,
            hidden_state_noise=online.hidden_state_noise,
        )
        self._state = FlatState(model, self._trainer.optimizer)
        self._before: tuple[Tensor, int, int] | None = (
            None  # state where the window began, once it has changed
        )
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
        """The policy's embedding and LM head [V, H] of `version`, copied. Once a version, before it rolls out."""
        self.tables.set(version, embed, head)

    def begin_step(self, policy_version: int) -> None:
        """A rollout by `policy_version` begins: what is too old goes, with its tables."""
        self.buffer.begin_step(policy_version)
        self.tables.keep({policy_version, *self.buffer.versions()})

    def train_step(self) -> dict[str, float] | None:
        """One micro-step; None if there is nothing to train on. All ranks of a unit call it together.

        Raises DrafterError if the loss or the gradient is not finite, or memory ran out, on any rank of the unit: the
        drafter is then what it was when the window began, and `train_step` returns None from then on.
        """
        if not self.enabled:
            return None
        sample = self.buffer.sample(self.micro_step_tokens * self._tp.size, self.tables.__contains__)
        if sample is None:
            return None
        try:
            metrics = self._learn(sample)
        except DrafterError as error:
            self.disable(str(error))
            raise
        # Own share only: the shares of a unit's ranks add up to what their one drafter was trained on.
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
        self._trainer.set_policy(*self.tables.get(version))
        metrics = self._gradient(sample)
        loss = metrics["loss"]
        if not math.isfinite(loss):
            raise DrafterError(f"the drafter's loss is {loss} on hidden states of policy version {version}")
        try:
            applied = self._trainer.apply()
        except RuntimeError as error:  # behind the unit's collective: nobody waits for this rank
            if not _is_out_of_memory(error):
                raise
            raise DrafterError(f"out of memory in the drafter's optimizer step: {error}") from error
        # A mean that has seen few steps is short, so that it forgets where it began.
        self._state.follow(min(self._decay, self.trained_steps / (self.trained_steps + _MEAN_START)))
        return {**metrics, **applied, "policy_version": float(version)}

    def _gradient(self, sample: list[DraftSequence]) -> dict[str, float]:
        """Gradient of the whole sample in `grad`, summed over the unit; metrics likewise."""
        share, counts = self._share(sample), bases_by_step(sample, self._draft_steps)
        names = ["loss", "tokens"]
        names += [
            f"{kind}/{j}" for kind in ("hidden", "ce", "accept") for j in range(1, self._draft_steps + 1)
        ]
        metrics: dict[str, float] = dict.fromkeys(names, 0.0)
        failure: str | None = None
        self._trainer.optimizer.zero_grad(set_to_none=True)
        try:
            if self._before is None:
                self._before = (self._state.read(), self._state.steps, self._trainer.trained_steps)
            if share:
                metrics |= self._trainer.backward(collate(share, self._device), counts)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            failure = f"out of memory in a drafter micro-step of {self.micro_step_tokens} tokens: {error}"
        if self._tp.size > 1:  # a rank that failed must come, too: the others wait for it
            metrics = self._sum_over_unit(metrics, failure is not None)
        if failure is not None:
            raise DrafterError(failure)
        return metrics

    def _sum_over_unit(self, metrics: dict[str, float], failed: bool) -> dict[str, float]:
        parameters = list(self.model.parameters())
        values = torch.tensor([math.nan if failed else v for v in metrics.values()], device=self._device)
        none = torch.zeros((), device=self._device)
        parts = [none.expand(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters]
        flat = torch.cat([values, *parts])
        self._tp.all_reduce(flat)
        summed, *gradients = flat.split([len(values), *(p.numel() for p in parameters)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return dict(zip(metrics, summed.tolist(), strict=True))

    # -- between windows ------------------------------------------------------------------------------------

    def merge(self, all_reduce: Callable[[Tensor], None], rank: int = 0, size: int = 1) -> MergeReport:
        """Makes one drafter of all ranks' again: all of the state is means, weighted by the tokens trained on.

        Collective over the `size` ranks; `all_reduce` sums over them in place, with the same bits on every rank (two
        calls; one if nobody trained, and then nothing changes). Afterwards all ranks hold the same bits. If a mean is
        not finite, all ranks go back to where the window began and train no more.
        """
        state, trainer = self._state, self._trainer
        window = RankWindow(self.window_tokens, state.steps, trainer.trained_steps, not self.enabled)
        windows = exchange_windows(window, all_reduce, rank, size, self._device)
        total, rolled_back = sum(w.tokens for w in windows), False
        if total:
            merged = merge_states(state, self.window_tokens / total, all_reduce)
            rolled_back = not bool(torch.isfinite(merged).all())
            if rolled_back:
                self.drop_window()
                self.failure = self.failure or "the mean of the replicas' drafters was not finite"
            else:
                state.write(merged)
                state.steps = max(w.optimizer_steps for w in windows)
                trainer.trained_steps = max(w.trained_steps for w in windows)
                self.version += 1
                self.trained_tokens += total
        self._before, self.window_tokens = None, 0
        trained = bool(total) and not rolled_back
        failed = tuple(r for r, w in enumerate(windows) if w.disabled)
        return MergeReport(self.version, trained, tuple(w.tokens for w in windows), failed, rolled_back)

    def drop_window(self) -> None:
        """Forgets the window: this rank's drafter is what it was when it began."""
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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises CheckpointError if it is of another policy's drafter."""
        for kind in ("model", "raw", "exp_avg", "exp_avg_sq"):
            if kind not in state:
                raise CheckpointError(f"the drafter's state has no {kind!r}")
            check_eagle_tensors(state[kind], self.model.config)
        self._state.load(state)
        self._trainer.trained_steps = int(state["trained_steps"])
        self.version, self.trained_tokens = int(state["version"]), int(state["trained_tokens"])
        self.buffer.load_counters(state["buffer"])
        self._before, self.window_tokens = None, 0

    def metrics(self) -> dict[str, float]:
        """What stands in the buffer, and how far training is."""
        return {
            "version": float(self.version),
            "trained_tokens": float(self.trained_tokens),
            "disabled": float(not self.enabled),
            **{f"buffer/{name}": value for name, value in self.buffer.metrics().items()},
        }


def _options(section: DrafterSection) -> DrafterSection:
    """The warm-up's options with what differs online: a constant rate, among others."""
    online = section.online
    names: Sequence[str] = ("lr", "warmup_steps", "weight_decay", "clip_grad", "draft_steps")
    return section.model_copy(
        update={"schedule": "constant", **{name: getattr(online, name) for name in names}}
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)

"""The extension of vLLM's worker: keyed sampling, hidden states, weights in place. Called by `collective_rpc`.

vLLM mixes the class into its worker: no `__init__`, names of our own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.backends.drafting import StepDrafting
from megatron_tlt.backends.entries import Location, Sums, checksums, load_tensors
from megatron_tlt.backends.token_drafts import TokenDrafts
from megatron_tlt.backends.vllm.plugin import compat
from megatron_tlt.backends.vllm.plugin.hidden import HIDDEN, PositionTap
from megatron_tlt.backends.vllm.plugin.keyed import KeyedSampling
from megatron_tlt.config.speculation import SpeculationSection


class VllmWorkerExtension:
    """Methods of the worker that the server calls."""

    model_runner: Any
    tlt_drafting: StepDrafting | None
    tlt_sampling: KeyedSampling
    tlt_tap: PositionTap | None
    tlt_chosen: compat.Chosen  # by `bind_routers_at_load`
    tlt_routed_experts: PositionTap | None
    _tlt_is_loading: bool

    def tlt_install(
        self,
        hidden_bytes: int,
        max_len: int,
        max_requests: int,
        speculation: dict[str, Any],
        routed_experts: str | None,
        verify_rows: int | None,
    ) -> None:
        """Takes sampling over; keeps hidden states if `hidden_bytes`. Once, before the first request.

        `speculation`: the fields of `SpeculationSection`. `routed_experts`: the type in which each token's experts are
        kept; None: they are not. `verify_rows`: most rows of a step that verifies pre-rolled responses; None: requests
        bring none.
        """
        section, tokens, runner = SpeculationSection.model_validate(speculation), None, self.model_runner
        budget = compat.step_tokens(runner)
        if section.drafter == "suffix" or verify_rows is not None:
            vocab, longest = runner.model_config.get_vocab_size(), runner.speculative_config.num_speculative_tokens
            # vLLM cuts a response behind its end, but only after the step that has drawn more.
            tokens = TokenDrafts(section, max_requests, max_len + longest, vocab, longest, verify_rows or 0, budget)
        self.tlt_drafting = None
        if section.drafter != "none" or verify_rows is not None:
            self.tlt_drafting = StepDrafting(section, torch.device(runner.device), budget, tokens, compat.first_ranks)
        self.tlt_sampling = KeyedSampling(runner, self.tlt_drafting)
        self.tlt_tap = self.tlt_routed_experts = None
        if hidden_bytes:
            self.tlt_tap = PositionTap(
                runner,
                max_len,
                max_requests,
                hidden_bytes,
                is_taken=lambda request: bool(compat.extra_args(runner, request)[HIDDEN]),
            )
        if routed_experts is not None:
            read = partial(self.tlt_chosen.of, dtype=getattr(torch, routed_experts))
            self.tlt_routed_experts = PositionTap(runner, max_len, max_requests, states=read)
        self._tlt_is_loading = False

    def tlt_end(self, request: str, count: int) -> dict[str, Tensor]:
        """The request has ended: its "hidden" states and "routed_experts" [count, W], those that were kept."""
        self.tlt_sampling.forget(request)
        taps = {"hidden": self.tlt_tap, "routed_experts": self.tlt_routed_experts}
        taken = {name: tap.take(request, count) for name, tap in taps.items() if tap is not None}
        return {name: states for name, states in taken.items() if states is not None}

    def tlt_release(self) -> None:
        """Frees what is kept of running responses, when there are none."""
        for tap in (self.tlt_tap, self.tlt_routed_experts):
            if tap is not None:
                tap.release()
        torch.cuda.empty_cache()

    def tlt_stats(self) -> dict[str, Any]:
        """Steps and drafts since the last call. Resets them."""
        return self.tlt_sampling.take_stats()

    def tlt_begin_update(self) -> None:
        """Opens a weight sync of the policy; one that was open is given up: its layers are half loaded until the
        next."""
        model = self.model_runner.get_model()
        if self._tlt_is_loading:
            compat.end_reload(self, model, is_draft=False)
        compat.begin_reload(self, model)
        self._tlt_is_loading = True

    def tlt_update(self, location: Location, verify: bool) -> Sums:
        """Loads some of the policy's tensors; returns the CRC-32 of each as it arrived, if `verify`."""
        return self._tlt_load(self.model_runner.get_model(), location, verify)

    def tlt_finish_update(self) -> None:
        """All tensors of the policy have come: it serves them."""
        compat.end_reload(self, self.model_runner.get_model(), is_draft=False)
        self._tlt_is_loading = False
        if self.tlt_drafting is not None:
            self.tlt_drafting.policy_changed()

    def tlt_update_drafter(self, location: Location, verify: bool) -> Sums:
        """Loads all tensors of the drafter, in place; its tables are the policy's. Raises ValueError without one."""
        model = compat.draft_model(self)
        if model is None:
            raise ValueError("this engine has no trained drafter")
        compat.begin_reload(self, model)
        sums = self._tlt_load(model, location, verify)
        compat.end_reload(self, model, is_draft=True)
        if self.tlt_drafting is not None:
            self.tlt_drafting.drafter_changed()
        return sums

    def _tlt_load(self, model: Any, location: Location, verify: bool) -> Sums:
        device = torch.device(self.model_runner.device)
        tensors = load_tensors(location, device if device.type == "cpu" else device.index or 0)
        if "ipc" in location:  # a layer's parts wait for the last one, while the sender uses its memory again
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        sums = checksums(tensors) if verify else {}
        compat.load(self, model, list(tensors.items()))
        return sums

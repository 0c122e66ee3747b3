"""Cross-checks of the rollout backend: settings that its kind of engine does not support."""

from __future__ import annotations

from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.interfaces import CAPABILITIES


def check_backend(config: Config, shape: ArchitectureConfig | None, device: str | None) -> Problems:
    """Settings beyond the engine's `BackendCapabilities`, and wrong settings of an engine's own section."""
    yield from _check_sampling(config)
    yield from _check_drafting(config)
    can, rollout = CAPABILITIES[config.rollout.backend], config.rollout
    if not can.tensor_parallel and rollout.tp > 1:
        allowed = f"must be 1 with rollout.backend: {rollout.backend} (one engine a rank, on one GPU)"
        yield ConfigProblem("rollout.tp", rollout.tp, allowed)
    if not can.routed_experts and config.actor.router_replay == "rollout":
        allowed = f"must be 'off' with rollout.backend: {rollout.backend}, whose responses do not name their experts"
        yield ConfigProblem("actor.router_replay", "rollout", allowed)
    if rollout.engine_process is None:
        return
    yield from rollout.engine_process.problems(config, shape, device)
    if rollout.kernels != "auto":
        allowed = f"must be 'auto' with rollout.backend: {rollout.backend}, whose engine has kernels of its own"
        yield ConfigProblem("rollout.kernels", rollout.kernels, allowed)
    if config.sync.transport == "cuda_ipc" and device == "cpu":
        yield ConfigProblem("sync.transport", "cuda_ipc", "must be 'shared_memory' on CPU")


def _check_sampling(config: Config) -> Problems:
    can, rollout = CAPABILITIES[config.rollout.backend], config.rollout
    name = f"rollout.backend: {rollout.backend}"
    if not can.keyed_sampling and config.train.deterministic is True:
        allowed = f"must be false with {name}: its responses cannot be repeated, so no run can"
        yield ConfigProblem("train.deterministic", True, allowed)
    if not can.stop_strings and rollout.stop:
        allowed = f"must be empty with {name}, which stops at tokens only"
        yield ConfigProblem("rollout.stop", rollout.stop, allowed)


def _check_drafting(config: Config) -> Problems:
    """Our drafters and selectors, and drafter training in idle time."""
    backend, section = config.rollout.backend, config.rollout.speculation
    can, name, at = CAPABILITIES[backend], f"rollout.backend: {backend}", "rollout.speculation"
    if can.drafters is not None and section.drafter not in can.drafters:
        allowed = f"must be {', '.join(map(repr, can.drafters))} with {name}"
        yield ConfigProblem(f"{at}.drafter", section.drafter, allowed)
    chosen = section.drafter != "none" and "selector" in section.model_fields_set
    if chosen and not can.selectors:
        allowed = f"cannot be had with {name}, whose draft length is the same for all steps"
        yield ConfigProblem(f"{at}.selector", section.selector, allowed)

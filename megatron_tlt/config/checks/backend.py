"""Cross-checks of the rollout backend: settings that its kind of engine does not support."""

from __future__ import annotations

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.types import CAPABILITIES


def check_backend(config: Config, device: str | None) -> Problems:
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
    if rollout.engine_process is not None:
        yield from _check_process(config, device)
    if rollout.backend == "trtllm":
        yield from _check_trtllm(config)
    if rollout.backend == "vllm":
        yield from _check_vllm(config, device)


def _check_process(config: Config, device: str | None) -> Problems:
    """Settings of the embedded engine that one in a process of its own does not read, and how weights get there."""
    rollout = config.rollout
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
    elif section.trained and section.trained.engines and backend not in section.trained.engines:
        engines = " or ".join(map(repr, section.trained.engines))
        form = f"which has a form of {section.drafter} that {backend} lacks"
        allowed = f"must be {engines} with the drafter in {section.drafter_path}, {form}"
        yield ConfigProblem("rollout.backend", backend, allowed)
    chosen = section.drafter != "none" and "selector" in section.model_fields_set
    if chosen and not can.selectors:
        allowed = f"cannot be had with {name}, whose draft length is the same for all steps"
        yield ConfigProblem(f"{at}.selector", section.selector, allowed)


def _check_vllm(config: Config, device: str | None) -> Problems:
    section, speculation = config.rollout.vllm, config.rollout.speculation
    has_bandit = speculation.drafter != "none" and speculation.selector == "beg_mab"
    if has_bandit and set(speculation.bandit.arms) == {0}:
        allowed = "must have an arm that drafts with rollout.backend: vllm (none drafts: drafter: none)"
        yield ConfigProblem("rollout.speculation.bandit.arms", speculation.bandit.arms, allowed)
    if config.rollout.numerics == "invariant" and device == "cpu":
        allowed = "must be 'default' on CPU with rollout.backend: vllm, whose batch-invariant mode needs Triton"
        yield ConfigProblem("rollout.numerics", "invariant", allowed)
    if config.idle.train_drafter and config.hidden_states_of == "engine" and not section.hidden_mib:
        allowed = "must be above 0 with idle.train_drafter, or there is nothing to train on"
        yield ConfigProblem("rollout.vllm.hidden_mib", 0, allowed)


def _check_trtllm(config: Config) -> Problems:
    rollout, section = config.rollout, config.rollout.trtllm
    at = "rollout.trtllm"
    if rollout.numerics != "default":
        allowed = "must be 'default' with rollout.backend: trtllm, whose responses depend on the batch"
        yield ConfigProblem("rollout.numerics", rollout.numerics, allowed)
    if section.python is None:
        allowed = "is required with rollout.backend: trtllm: the Python executable of its environment"
        yield ConfigProblem(f"{at}.python", None, allowed)
    if rollout.speculation.trained and rollout.min_p > 0:
        allowed = "must be 0 with speculation, whose sampler has no min_p"
        yield ConfigProblem("rollout.min_p", rollout.min_p, allowed)
    if rollout.kv_cache_mib is not None:
        allowed = "must be null with rollout.backend: trtllm: use rollout.trtllm.kv_cache_fraction"
        yield ConfigProblem("rollout.kv_cache_mib", rollout.kv_cache_mib, allowed)

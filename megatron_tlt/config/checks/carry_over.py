"""Cross-checks of partial rollouts (`rollout.carry_over`)."""

from __future__ import annotations

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems
from megatron_tlt.interfaces import CAPABILITIES


def check_carry_over(config: Config) -> Problems:
    """Settings that responses of several steps do not go with."""
    rollout, algorithm = config.rollout, config.algorithm
    carry_over, can = rollout.carry_over, CAPABILITIES[rollout.backend]
    if carry_over is None:
        if algorithm.mask_off_policy:
            yield ConfigProblem("algorithm.mask_off_policy", True, "needs rollout.carry_over: else no token is masked")
        return
    with_it = "with rollout.carry_over"
    if carry_over >= rollout.max_tokens:
        allowed = f"must be < rollout.max_tokens ({rollout.max_tokens}), or no response is ever carried over"
        yield ConfigProblem("rollout.carry_over", carry_over, allowed)
    if not (can.keyed_sampling and can.turns):
        able = " or ".join(repr(name) for name, c in CAPABILITIES.items() if c.keyed_sampling and c.turns)
        yield ConfigProblem("rollout.backend", rollout.backend, f"must be {able} {with_it}: others cannot continue one")
    if config.env is not None:
        allowed = "must be null with an environment, whose state ends with the step"
        yield ConfigProblem("rollout.carry_over", carry_over, allowed)
    if algorithm.dynamic_sampling:
        allowed = f"must be false {with_it}: a step has one round, in which some groups stay unfinished"
        yield ConfigProblem("algorithm.dynamic_sampling", True, allowed)
    if config.actor.router_replay != "off":
        allowed = f"must be 'off' {with_it}: the tokens of a response were routed by several policies"
        yield ConfigProblem("actor.router_replay", config.actor.router_replay, allowed)
    if rollout.stop and rollout.engine_process is not None:
        allowed = f"must be empty {with_it} and rollout.backend: {rollout.backend}, which sees a part of the response"
        yield ConfigProblem("rollout.stop", rollout.stop, allowed)
    yield from _check_earlier_tokens(config)


def _check_earlier_tokens(config: Config) -> Problems:
    """Tokens that earlier policies drew have a ratio or no loss."""
    rollout, algorithm, with_it = config.rollout, config.algorithm, "with rollout.carry_over"
    if algorithm.mask_off_policy:
        return
    if algorithm.name == "distill":
        allowed = f"must be true {with_it} and algorithm.name: distill, whose KL is of the present policy's own tokens"
        yield ConfigProblem("algorithm.mask_off_policy", False, allowed)
    elif not CAPABILITIES[rollout.backend].logprobs:
        allowed = f"must be true {with_it} and rollout.backend: {rollout.backend}, which gives no log-probs for a ratio"
        yield ConfigProblem("algorithm.mask_off_policy", False, allowed)
    elif algorithm.importance_cap == 0:
        allowed = f"must be >= 1 {with_it}, or algorithm.mask_off_policy true: earlier policies drew some tokens"
        yield ConfigProblem("algorithm.importance_cap", 0.0, allowed)

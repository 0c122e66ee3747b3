"""An engine's steps without a drive."""

from __future__ import annotations

from megatron_tlt.rollout.engine import Engine
from megatron_tlt.rollout.request import Request


def run_out(engine: Engine) -> list[Request]:
    """Steps until idle; the requests that ended, in the order of their arrival."""
    finished: list[Request] = []
    while not engine.is_idle:
        finished += engine.step()
    return sorted(finished, key=lambda request: request.order)

"""What the scripts in tools/ share: one process or many ranks, errors as exit codes."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from megatron_tlt.checkpoint.convert.ranks import Alone, Ranks
from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED
from megatron_tlt.distributed.launch import detect_launch
from megatron_tlt.errors import ConfigError, TltError


def run(name: str, body: Callable[[Ranks], int]) -> int:
    """Runs `body` on this rank; exit status 0, 1 (failed) or 2 (arguments or model cannot be converted).

    MPI is started only where a launcher started several ranks. SIGTERM ends like Ctrl-C: what is half written goes.
    """
    signal.signal(signal.SIGTERM, _leave)
    if detect_launch().size in (1, None):
        return _guarded(name, body, Alone())
    from megatron_tlt.config.run import DistributedSection
    from megatron_tlt.distributed.world import World

    world = World.start(DistributedSection(device="cpu"))
    try:
        status = _guarded(name, body, world)
    except BaseException:  # the other ranks would wait for ever for one that died
        traceback.print_exc()
        world.abort(FAILED)
        raise
    world.close()
    return status


def _guarded(name: str, body: Callable[[Ranks], int], ranks: Ranks) -> int:
    try:
        return body(ranks)
    except TltError as error:
        if ranks.is_main:  # every rank has the same error, or knows whose it is
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError) else FAILED


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

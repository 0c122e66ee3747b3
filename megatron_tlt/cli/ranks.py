"""Running the body of a command on every rank of the job: one rank's error ends all of them."""

from __future__ import annotations

import errno
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from megatron_tlt.cli.exit_codes import BAD_INPUT, FAILED, OK, SAVED
from megatron_tlt.errors import (
    ConfigError,
    DataError,
    DistributedError,
    RewardError,
    SharedError,
    TltError,
    printable,
)
from megatron_tlt.observe.attempt import note_exit
from megatron_tlt.observe.log import setup_logging
from megatron_tlt.workers.scratch import sweep_scratch

if TYPE_CHECKING:
    from types import FrameType

    from megatron_tlt.config.run import DistributedSection
    from megatron_tlt.distributed.world import World
    from megatron_tlt.interfaces import RankOutcome
    from megatron_tlt.trainer.job import Job

# Printed by megatron-core at import, once a rank, about things that are as they should be on this machine.
_VENDOR_NOISE = (
    "Transformer Engine and Apex",
    "Apex is not installed",
    "full scope is deprecated",
    ".*load_state_dict.* is deprecated",
    "Please use DTensor instead",
    ".*CUDA_DEVICE_MAX_CONNECTIONS",
    ".torch.distributed.*is deprecated",
)

_SAID_S = 5.0  # for rank 0 to print, or to remove what is unfinished, before another rank ends it

_OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EMFILE,
    errno.ENFILE,
)  # fmt: skip

# Settings that a phase's memory depends on, by the phase's name.
_ENGINE_MEMORY = "rollout.max_batched_tokens, rollout.kv_cache_mib, cluster.reserve_gib"
_MEMORY = {
    "update": "actor.micro_batch_tokens, actor.recompute, actor.offload_optimizer",
    "logprobs": "actor.micro_batch_tokens, actor.offload_optimizer",
    "weight_sync": "sync.bucket_mib, rollout.kv_cache_mib, cluster.reserve_gib",
    "load": "rollout.kv_cache_mib, rollout.graph_memory_mib, cluster.reserve_gib",
}


def run_on_every_rank(section: DistributedSection, threads: int | None, body: Callable[[World], int | None]) -> int:
    """Runs `body(world)` on this rank of the job; any error ends every rank. Returns its exit code, None is 0.

    `threads`: PyTorch threads of this rank. With an exit code other than 0 from `body` the process ends here.
    """
    from megatron_tlt.distributed.world import World

    for text in _VENDOR_NOISE:
        warnings.filterwarnings("ignore", message=text)
    try:
        world = World.start(section, threads)
    except DistributedError as error:
        print(printable(f"megatron-tlt: failed in phase start: {error}"), file=sys.stderr, flush=True)
        note_exit(FAILED)
        return FAILED
    setup_logging(world.rank, world.size, lambda: world.where)
    if world.local_rank == 0:
        sweep_scratch()
    try:
        code = body(world) or OK
        world.enter("exit")
        if world.is_main:
            note_exit(code)
        if code:
            world.leave(code)
        world.close()
    except (ConfigError, DataError, RewardError) as error:
        # Usually every rank finds the same problems, but one may be alone: the first one prints them.
        outcome: RankOutcome
        code, outcome, detail = BAD_INPUT, "ended", "refused: wrong configuration or input"
        if isinstance(error, RewardError) or world.is_accepted:
            code, outcome, detail = FAILED, "failed", str(error)
        if world.store.add("config_error", 1) == 1:
            print_problems(error)
            note_exit(code)
        world.refuse(outcome, detail)
        world.leave_refused(code)
        return code
    except KeyboardInterrupt as error:
        _leave_to_first(world)  # once it has removed what is unfinished
        world.abort(*report_interrupt(world.is_main, error))
    except BaseException as error:  # noqa: BLE001  one rank's error must end all ranks, whatever it is
        behind = world.ranks_behind() if is_timeout(error) else None
        text = failure_text(world, error, behind)
        if isinstance(error, SharedError):
            _leave_to_first(world)  # it finds the same, and says it
        print(text, file=sys.stderr, flush=True)
        note_exit(FAILED)
        others = [rank for rank in range(world.size) if rank != world.rank]
        world.abort(FAILED, text.splitlines()[0], () if behind is None else list(behind) or others)
    return OK


def _leave_to_first(world: World) -> None:
    """Gives rank 0 some seconds to end all ranks."""
    if not world.is_main:
        time.sleep(_SAID_S)


def run_job(job: Job) -> int:
    """Runs a training; returns its exit code. Collective."""
    stopped = job.run()
    job.close()
    return SAVED if stopped else OK


def sigterm_as_ctrl_c() -> None:
    """From now on SIGTERM ends this process as Ctrl-C does: what is unfinished is removed. The main thread only."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # Slurm sends it twice, and the second one would cut the removal short
    raise KeyboardInterrupt(signal.Signals(number).name)


def report_interrupt(is_first: bool, error: KeyboardInterrupt) -> tuple[int, str]:
    """Says, on the first rank, that Ctrl-C, or the signal that `error` names, ends a command that has nothing to save,
    and notes the exit code. Returns that code, 130 or 143, and what it says.
    """
    name = str(error)
    code, text = 128 + signal.Signals[name or "SIGINT"], f"ended by {name or 'Ctrl-C'}"
    if is_first:
        print(f"megatron-tlt: {text}", file=sys.stderr, flush=True)
    note_exit(code)
    return code, text


def print_problems(error: ConfigError | DataError | RewardError) -> None:
    """All problems on stderr, one a line."""
    if not isinstance(error, ConfigError):
        print(printable(f"megatron-tlt: {error}"), file=sys.stderr, flush=True)
        return
    lines = [f"megatron-tlt: {len(error.problems)} problem(s) in command or configuration:"]
    print(printable("\n".join([*lines, *(f"  {problem}" for problem in error.problems)])), file=sys.stderr, flush=True)


def is_timeout(error: BaseException) -> bool:
    """Whether the error is the timeout of a collective. Gloo and NCCL have no class for it, only for their errors."""
    from torch.distributed import DistError

    text = str(error).lower()
    of_torch = isinstance(error, DistError) or (type(error) is RuntimeError and "gloo/transport/" in text)
    return of_torch and ("timed out" in text or "timeout" in text)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the error is of the disk, of permissions or of open files: its text says all that can be done."""
    return isinstance(error, OSError) and error.errno in _OF_THE_MACHINE


def failure_text(world: World, error: BaseException, behind: dict[int, str] | None) -> str:
    """Rank, phase, step and error; for a timeout also the ranks `behind`, for a lack of memory the phase's settings,
    for a programming error the traceback.
    """
    from torch import OutOfMemoryError

    lines = [f"megatron-tlt: rank {world.rank} failed in {world.where}: {type(error).__name__}: {error}"]
    if behind is not None:
        ranks = [f"rank {rank} (still in {phase})" for rank, phase in behind.items()]
        missing = "; ".join(ranks) or "none: every rank reached this phase"
        lines.append(f"  waited {world.timeout_s:g} s (distributed.timeout_s); not arrived: {missing}")
    if isinstance(error, OutOfMemoryError):
        phase = world.where.removeprefix("phase ").partition(",")[0]
        settings = _MEMORY.get(phase, _ENGINE_MEMORY)
        lines.append(f"  its memory depends on {settings}: docs/guides/memory.md")
    elif not isinstance(error, TltError) and not is_of_the_machine(error):
        lines.append("".join(traceback.format_exception(error)))
    return printable("\n".join(lines))

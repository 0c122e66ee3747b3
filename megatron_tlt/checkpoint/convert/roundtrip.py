"""Hugging Face to Megatron to Hugging Face, every tensor compared bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from megatron_tlt.checkpoint.convert import to_hf, to_megatron
from megatron_tlt.checkpoint.convert.inspection import Difference, compare, open_checkpoint
from megatron_tlt.distributed.together import Ranks, together
from megatron_tlt.errors import CheckpointError, ConfigError


def check_work(work: Path | None, ranks: Ranks) -> None:
    """Raises ConfigError on rank 0 if there can be no scratch directory under `work`."""
    if ranks.is_main and work is not None and not (work.is_dir() and os.access(work, os.W_OK | os.X_OK)):
        raise ConfigError.of("--work", str(work), "must be a directory that exists and can be written to")


def roundtrip(todo: to_megatron.Plan, work: Path | None, ranks: Ranks) -> Difference:
    """Does `todo` and the way back in a scratch directory under `work` (default: the system's), then removes it.

    Collective. Raises what the conversions raise, and CheckpointError if config.json comes back as another model.
    """
    hf = todo.source.directory
    with together(ranks):
        made = tempfile.mkdtemp(prefix="roundtrip-", dir=work) if ranks.is_main else ""
    scratch = Path(ranks.broadcast_object(made))
    found: Difference | None = None
    try:
        to_megatron.write(todo, scratch / "megatron", ranks)
        with together(ranks):
            back_again = to_hf.plan(scratch / "megatron", None, verify=ranks.is_main)
        to_hf.write(back_again, scratch / "hf", ranks)
        with together(ranks):
            if ranks.is_main:
                before, after = open_checkpoint(hf), open_checkpoint(scratch / "hf")
                if before.config != after.config:
                    raise CheckpointError(f"the config.json of {hf} came back as another model")
                found = compare(before, after)
        difference: Difference = ranks.broadcast_object(found)
        return difference
    finally:
        if ranks.is_main:
            shutil.rmtree(scratch, ignore_errors=True)

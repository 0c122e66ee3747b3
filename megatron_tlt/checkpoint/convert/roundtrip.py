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


def roundtrip(hf: Path, tp: int, pp: int, dtype: str | None, work: Path | None, ranks: Ranks) -> Difference:
    """Converts `hf` in a scratch directory under `work` (default: the system's), which is removed at the end.

    `dtype` None keeps the stored type. Collective. Raises what the conversions raise, ConfigError for `work`, and
    CheckpointError if config.json comes back as another model.
    """
    with together(ranks):
        if ranks.is_main and work is not None and not (work.is_dir() and os.access(work, os.W_OK | os.X_OK)):
            raise ConfigError.of("--work", str(work), "must be a directory that exists and can be written to")
        todo = to_megatron.plan(hf, tp, pp, dtype)
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

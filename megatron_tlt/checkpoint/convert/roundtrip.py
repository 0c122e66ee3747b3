"""There and back: Hugging Face to Megatron to Hugging Face, every tensor compared bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_tlt.checkpoint.convert import to_hf, to_megatron
from megatron_tlt.checkpoint.convert.hf_dir import HfDir
from megatron_tlt.checkpoint.convert.inspection import Difference, compare
from megatron_tlt.checkpoint.convert.output import check_room
from megatron_tlt.checkpoint.convert.ranks import Ranks, together
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.config import ModelConfig


@dataclass(frozen=True)
class Outcome:
    """What came back: the tensors' difference, and whether config.json still describes the same model."""

    difference: Difference
    same_config: bool
    retyped: bool  # another type was asked for

    @property
    def exact(self) -> bool:
        """Whether nothing was lost: every bit came back, or with another type every number."""
        same = not self.difference.differing if self.retyped else self.difference.same_bits
        return same and self.same_config


def roundtrip(hf: Path, tp: int, pp: int, dtype: str | None, work: Path | None, ranks: Ranks) -> Outcome:
    """Converts `hf` in a scratch directory under `work` (default: the system's), which is removed at the end.

    `dtype` None keeps the stored type. Collective. Raises what the conversions raise, and ConfigError for `work`.
    """
    with together(ranks):
        if ranks.is_main and work is not None and not (work.is_dir() and os.access(work, os.W_OK | os.X_OK)):
            raise ConfigError.of("--work", str(work), "must be a directory that exists and can be written to")
        todo = to_megatron.plan(hf, tp, pp, dtype)
    scratch: Path | None = None
    with together(ranks):
        if ranks.is_main:
            scratch = Path(tempfile.mkdtemp(prefix="roundtrip-", dir=work))
            check_room(scratch / "megatron", 2 * todo.num_bytes)
    scratch = Path(ranks.broadcast_object(str(scratch)))
    try:
        to_megatron.write(todo, scratch / "megatron", ranks)
        with together(ranks):
            back_again = to_hf.plan(scratch / "megatron", None, verify=ranks.is_main)
        to_hf.write(back_again, scratch / "hf", ranks)
        outcome: Outcome | None = None
        with together(ranks):
            if ranks.is_main:
                back = HfDir(scratch / "hf")
                same = ModelConfig.from_hf(hf) == back.config
                outcome = Outcome(compare(todo.source, back), same, dtype is not None)
        found: Outcome = ranks.broadcast_object(outcome)
        return found
    finally:
        if ranks.is_main:
            shutil.rmtree(scratch, ignore_errors=True)

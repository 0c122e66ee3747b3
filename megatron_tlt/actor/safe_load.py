"""Loading a checkpoint without running code from it: megatron and torch would unpickle parts of it.

.metadata       torch unpickles it without a check: read here first, by an unpickler that builds torch's records only
common.pt, layers' extra state      `torch.load`: with weights_only, whatever the caller passes
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.actor.torch_dist_reader import METADATA, read_metadata
from megatron_tlt.errors import CheckpointError

# Without torch's own text, which recommends to try again without the protection.
_REFUSED = "checkpoint {} holds more than numbers (weights_only would not open it): nothing of it was run"


@contextmanager
def no_pickles(directory: Path) -> Iterator[None]:
    """While megatron loads `directory`: CheckpointError for anything that is not numbers, or cannot be read.

    Use from one thread.
    """
    read_metadata(directory / METADATA)
    load = torch.load

    def numbers_only(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **{**options, "weights_only": True})

    torch.load = numbers_only
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(_REFUSED.format(directory)) from error
    except CheckpointException as error:  # an error on any rank; torch derives it from BaseException
        failures = [failure for failure, _ in error.failures.values()]
        if any(isinstance(failure, pickle.UnpicklingError) for failure in failures):
            raise CheckpointError(_REFUSED.format(directory)) from error
        raise CheckpointError(f"checkpoint {directory} cannot be read: {failures[0]}") from error
    finally:
        torch.load = load

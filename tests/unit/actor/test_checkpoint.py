"""Saves of the policy without ranks; those with ranks are in tests/mpi."""

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor.checkpoint import _disk_errors
from megatron_tlt.errors import CheckpointError
from tests.helpers.disk import files_of_at_most


def test_a_write_that_fails_in_torchs_archive_is_an_error_of_the_checkpoint(tmp_path):
    """As on a full disk: the RuntimeError of torch 2.13 names neither disk nor file."""
    step, world = tmp_path / "step-000001", SimpleNamespace(is_main=True)
    refused = pytest.raises(CheckpointError, match=f"cannot write {step}")
    with files_of_at_most(10_000), refused, _disk_errors(world, step):
        torch.save(torch.ones(100_000), tmp_path / "common.pt")

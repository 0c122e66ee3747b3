"""Saves of the policy without ranks; those with ranks are in tests/mpi."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.actor.checkpoint import SaveHandle, _disk_errors
from megatron_tlt.actor.checkpoint_files import Manifest
from megatron_tlt.errors import CheckpointError, SaveError
from tests.helpers.disk import files_of_at_most

MANIFEST = Manifest(1, 1, 1, {}, {}, {}, {})


def test_a_write_that_fails_in_torchs_archive_is_an_error_of_the_checkpoint(tmp_path):
    """As on a full disk: the RuntimeError of torch 2.13 names neither disk nor file."""
    step, world = tmp_path / "step-000001", SimpleNamespace(is_main=True)
    refused = pytest.raises(CheckpointError, match=f"cannot write {step}")
    with files_of_at_most(10_000), refused, _disk_errors(world, step):
        torch.save(torch.ones(100_000), tmp_path / "common.pt")


@pytest.mark.parametrize("is_main", [True, False])
def test_metadata_that_the_first_rank_cannot_write_is_one_error_of_every_rank(tmp_path, is_main):
    """And the space is given back. With ranks: tests/mpi/test_actor_checkpoint.py."""

    def write_metadata():
        if is_main:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "step-000001.tmp").mkdir()
    gathered = iter([[(None, {}, 0.0)] * 2, ["No space left on device", None]])
    world = SimpleNamespace(
        is_main=is_main, wait_for_all=lambda: None, all_gather_object=lambda _: next(gathered),
    )  # fmt: skip
    strategy = SimpleNamespace(
        writer=SimpleNamespace(failure=None, records={}, ended_at=0.0), write_metadata=write_metadata,
    )  # fmt: skip
    handle = SaveHandle(world, tmp_path / "step-000001", MANIFEST, strategy, None, 0.0)
    with pytest.raises(SaveError, match="No space left on device"):
        handle._publish()
    assert (tmp_path / "step-000001.tmp").exists() != is_main

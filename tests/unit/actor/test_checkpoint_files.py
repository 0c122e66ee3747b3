"""Checkpoint directories as files: publishing, pruning, finding damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.actor import checkpoint_files as files
from megatron_tlt.actor.checkpoint_files import Manifest
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import RopeScaling
from tests.helpers.tiny_models import TINY

SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
RECORDS = {"family": "qwen3"}, {"dtype": "fp32"}  # of model and training


def manifest(step: int, records: tuple[dict, dict] = RECORDS) -> Manifest:
    return Manifest(step, 1, 1, {"tp": 1}, *records, {"data": step})


def published(checkpoints: Path, step: int, keep: int | None = None, records: tuple[dict, dict] = RECORDS) -> Path:
    directory = files.step_directory(checkpoints, step)
    scratch = files.scratch_of(directory)
    scratch.mkdir(parents=True)
    (scratch / "shard").write_bytes(b"weights of step %d" % step)
    files.publish(directory, manifest(step, records), keep)
    return directory


def test_publish_moves_latest_and_records_every_file(tmp_path: Path) -> None:
    directory = published(tmp_path, 7)
    assert files.read_latest(tmp_path) == directory
    found = files.read_manifest(directory)
    assert set(found.files) == {"shard"}
    assert found.extra == {"data": 7}
    signs: list[str] = []
    assert files.damage_of(directory, on_file=lambda: signs.append("alive")) is None
    assert signs == ["alive"], "one a file"
    assert not files.scratch_of(directory).exists()


@pytest.mark.parametrize(("file", "why"), [("shard-of-rank-1", "is missing"), ("shard", "is torn: 17 of 18 bytes")])
def test_what_is_not_on_this_disk_is_not_published(tmp_path: Path, file: str, why: str) -> None:
    """As where each host writes to a disk of its own."""
    first, second = published(tmp_path, 1), files.step_directory(tmp_path, 2)
    (scratch := files.scratch_of(second)).mkdir()
    (scratch / "shard").write_bytes(b"weights of step 2")
    recorded = replace(manifest(2), files={file: files.FileRecord(18, "")})
    with pytest.raises(CheckpointError, match=rf"step-000002 is not complete: {file} {why} .*disk that their hosts"):
        files.publish(second, recorded, keep=1)
    assert files.read_latest(tmp_path) == first and first.is_dir() and not second.exists()


@pytest.mark.parametrize(("start", "kept"), [(0, [5]), (2, [5, 2]), (6, [5, 4])])
def test_the_first_save_behind_an_earlier_step_leaves_none_that_the_run_did_not_go_on_from(
    tmp_path: Path, start: int, kept: list[int]
) -> None:
    """It had left step 4 in the place of step 2. Behind step 6 it is step 5 that is saved again."""
    for step in (2, 4, 6):
        published(tmp_path, step)
    files.write_latest(tmp_path, f"step-{start:06d}")
    published(tmp_path, 5, keep=2)
    assert [files.step_of(path) for path in files.complete_steps(tmp_path)] == kept


def test_keep_last_k_also_removes_leftovers_and_an_abandoned_future(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        published(tmp_path, step)
    (tmp_path / "step-000008.tmp").mkdir()
    published(tmp_path, 4, keep=2)
    assert [path.name for path in files.complete_steps(tmp_path)] == ["step-000004", "step-000003"]
    assert not (tmp_path / "step-000008.tmp").exists()


@pytest.mark.parametrize("change", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-5}, {"rope_scaling": SCALING}])
def test_models_of_one_shape_and_other_constants_differ(change: dict) -> None:
    other = replace(TINY, **change)
    found, wanted = json.loads(json.dumps(files.model_record(TINY))), files.model_record(other)
    (text,) = files.model_differences(found, wanted)
    assert text.startswith(f"{next(iter(change))} is ")
    assert not files.model_differences(json.loads(json.dumps(wanted)), files.model_record(other))


def test_an_edited_manifest_shows(tmp_path: Path) -> None:
    directory = published(tmp_path, 5)
    file = directory / files.MANIFEST
    file.write_text(file.read_text().replace('"step": 5', '"step": 6'))
    with pytest.raises(CheckpointError, match=r"step-000005.*digest"):
        files.read_manifest(directory)

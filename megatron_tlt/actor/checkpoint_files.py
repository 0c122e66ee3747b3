"""Checkpoint directories as files: names, manifest, verification, the `latest` pointer, pruning. Torch-free.

    run_dir/checkpoints/step-000120.tmp/    being written; never read
                        step-000120/        complete on disk: shards, megatron's metadata, manifest.json
                        latest              text file with the name of the one that the run goes on from: the newest
                                            complete one, or what a start has named since; step-000000: none

A directory gets its final name by one rename, after every file in it is on disk, and `latest` moves after
that, so a crash at any moment leaves `latest` on a complete checkpoint. A step that is saved again has no directory
between two renames: the next start of the run puts the older one back (`put_back`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_tlt.config.actor import ActorSection
from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.hf.config import MOE_FIELDS, ModelConfig
from megatron_tlt.observe.files import sync, write_atomically

MANIFEST = "manifest.json"
LATEST = "latest"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_REPLACED = ".old.tmp"  # of the name of a checkpoint while its step is saved again


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The record of a checkpoint: model, versions, and checksums of its files."""

    step: int
    policy_version: int
    optimizer_steps: int
    layout: dict[str, int]
    model: dict[str, Any]
    training: dict[str, str]  # dtype, optimizer, distributed optimizer, adapters, fingerprint of their base: must agree
    extra: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def is_converted(self) -> bool:
        """Whether a conversion wrote the checkpoint; else a run did."""
        return "converted_from" in self.extra

    def to_json(self) -> str:
        """Text with a digest of itself, so that an edited manifest shows."""
        files = {name: asdict(record) for name, record in self.files.items()}
        body = {"format": _FORMAT, **vars(self), "files": files}  # `asdict(self)` would copy all of `extra`
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError that names the error."""
        body = json.loads(text)
        if not isinstance(body, dict) or body.pop("digest", None) != _digest(body):
            raise ValueError("its digest does not match its content")
        if body.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        return cls(**body, files=files)


def model_record(config: ModelConfig) -> dict[str, Any]:
    """Shape and constants of the model as the manifest keeps them."""
    names = ["family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"]
    names += ["intermediate_size", "tie_word_embeddings", *(MOE_FIELDS if config.num_experts else ())]
    record = {name: getattr(config, name) for name in (*names, "rope_theta", "rms_norm_eps")}
    record["rope_scaling"] = config.rope_scaling and asdict(config.rope_scaling)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in record.items()}  # as JSON has them


def training_record(actor: ActorSection, optimizer: str, shards_optimizer: bool, base: str) -> dict[str, str]:
    """What two runs must agree in beside the model to load each other's checkpoints, as the manifest keeps it.

    `base`: fingerprint of the weights under adapters.
    """
    return {
        "dtype": actor.dtype,
        "optimizer": optimizer,
        "distributed_optimizer": "on" if shards_optimizer else "off",
        "lora": actor.lora.record if actor.lora is not None else "off",
        "base": base,
    }


def model_differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Differences between two records (`model_record`), for messages."""
    wrong = [(name, value) for name, value in wanted.items() if found.get(name) != value]
    return [f"{name} is {found.get(name)!r}, not {value!r}" for name, value in wrong]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps goes."""
    return checkpoints / f"step-{step:06d}"


def step_of(directory: Path) -> int:
    """The step in a checkpoint directory's name. Raises CheckpointError for another name."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise CheckpointError(f"{directory} is no checkpoint directory: its name must be step-NNNNNN")
    return int(match.group(1))


def complete_steps(checkpoints: Path) -> list[Path]:
    """Checkpoint directories with a final name, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def record_of(file: Path) -> FileRecord:
    """Size and checksum of a file, which is read once."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return FileRecord(file.stat().st_size, digest.hexdigest())


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError that names the directory and its damage."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {directory} does not exist")
    try:
        return Manifest.from_json((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {directory} has no {MANIFEST}: it was never completed") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {directory}: {MANIFEST} is damaged: {error}") from error


def damage_of(
    directory: Path,
    part: int = 0,
    parts: int = 1,
    checksums: bool = True,
    on_file: Callable[[], object] = lambda: None,
) -> str | None:
    """The missing, truncated or altered files among every `parts`-th file of the manifest from number `part` on.

    Without `checksums` no file is read: altered ones pass. `on_file` is called before each file.
    Raises CheckpointError if the manifest cannot be read.
    """
    records = read_manifest(directory).files
    damage = _damage(directory, {name: records[name] for name in sorted(records)[part::parts]}, checksums, on_file)
    return f"checkpoint {directory} is damaged: {damage}" if damage else None


def _damage(
    directory: Path, records: Mapping[str, FileRecord], checksums: bool, on_file: Callable[[], object] = lambda: None
) -> str:
    """Words for the files of `records` that are not in a directory as they were recorded; empty where all are."""
    damage = []
    for name, wanted in records.items():
        on_file()
        file = directory / name
        if not file.is_file():
            damage.append(f"{name} is missing")
        elif file.stat().st_size != wanted.size:
            damage.append(f"{name} is torn: {file.stat().st_size} of {wanted.size} bytes")
        elif checksums and record_of(file) != wanted:
            damage.append(f"{name} was altered: its checksum does not match")
    return shortened(damage, separator="; ")


def publish(directory: Path, manifest: Manifest, keep: int | None) -> None:
    """Names the finished `directory`.tmp, moves `latest`, removes the oldest beyond `keep`. One rank only.

    Raises CheckpointError where a file of `manifest` is not there with its size: its rank writes to another disk.
    """
    scratch = scratch_of(directory)
    if damage := _damage(scratch, manifest.files, checksums=False):
        where = "files of all ranks must come to one disk that their hosts share"
        raise CheckpointError(f"checkpoint {directory} is not complete: {damage} ({where})")
    records = dict(manifest.files)
    for file in sorted(scratch.iterdir()):
        if file.name not in records:
            records[file.name] = record_of(file)
        sync(file)
    write_atomically(scratch / MANIFEST, replace(manifest, files=records).to_json().splitlines())
    sync(scratch)
    old = directory.with_name(directory.name + _REPLACED)
    if directory.exists():  # saved again after a resume from an earlier step
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)  # deleting takes long, and `latest` may still point here
    os.rename(scratch, directory)
    sync(directory.parent)
    before = read_latest(directory.parent)
    write_latest(directory.parent, directory.name)
    shutil.rmtree(old, ignore_errors=True)
    if keep is not None:
        prune_checkpoints(directory.parent, keep, directory, step_of(before or directory))


def put_back(checkpoints: Path) -> None:
    """Renames back each checkpoint that a killed `publish` moved away and did not replace. The run's owner only."""
    for old in checkpoints.glob(f"step-*{_REPLACED}"):
        directory = old.with_name(old.name.removesuffix(_REPLACED))
        if not directory.exists():
            os.rename(old, directory)
            sync(checkpoints)


def prune_checkpoints(checkpoints: Path, keep: int, newest: Path, before: int) -> None:
    """Removes all but the `keep` newest checkpoints, and leftovers of interrupted saves; never `newest`.

    `before`: the step that `latest` named until then. Leftovers are removed first: `put_back` must not find one without
    its checkpoint. Then steps after `before` or `newest`: this run went on from before them.
    """
    others = [path for path in complete_steps(checkpoints) if path != newest]
    last = min(before, step_of(newest))
    older = [path for path in others if step_of(path) <= last]
    later = [path for path in others if step_of(path) > last]
    leftovers = [path for path in checkpoints.glob("step-*.tmp") if path != scratch_of(newest)]
    for path in [*leftovers, *later, *older[max(0, keep - 1) :]]:
        shutil.rmtree(path, ignore_errors=True)


def scratch_of(directory: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return directory.with_name(directory.name + ".tmp")


def write_latest(checkpoints: Path, name: str) -> None:
    """Moves `latest` to the checkpoint of that name, or absolute path where it is another run's. On disk at once."""
    write_atomically(checkpoints / LATEST, [name])
    sync(checkpoints)


def read_latest(checkpoints: Path) -> Path | None:
    """The checkpoint `latest` points to, of step 0 where the run begins anew, whatever is there. None where there is
    no pointer, or one that names no checkpoint.
    """
    pointer = checkpoints / LATEST
    name = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
    return checkpoints / name if _NAME.fullmatch(Path(name).name) else None

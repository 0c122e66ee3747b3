"""From a drafter directory to an exported one: reading, choosing the kind, and writing by one rename."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_tlt.drafter.checkpoint import CONFIG, KIND, load_drafter
from megatron_tlt.drafter.export.eagle import ExportFiles, Format, Origin, check_eagle_format, export_eagle
from megatron_tlt.drafter.export.eagle3 import KIND3, export_eagle3, load_eagle3
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.base import eagle_parameter_shapes
from megatron_tlt.models.loader import iter_weights

_SPARE = 1 << 20  # bytes for headers, JSON and the card


def export_drafter(
    drafter: str | Path,
    out: str | Path,
    kind: Format,
    dtype: torch.dtype = torch.bfloat16,
    policy: str | Path | None = None,
) -> ExportFiles:
    """Reads the drafter directory, writes the export to `out` and returns what was written.

    `policy` is a Hugging Face directory. It must have the drafter's shape; format hf copies its embedding and LM head.
    Everything that can be wrong is found before `out` appears: ConfigError for what the engine cannot run,
    CheckpointError for a drafter or policy that is torn or does not fit, an `out` that exists, or a full disk.
    """
    target = Path(out)
    refuse_existing(target)
    about = read_about(Path(drafter))
    if about["drafter"] == KIND3:
        if policy is not None:
            raise ConfigError.of(
                "policy", str(policy), "a drafter of kind eagle3 has a head of its own: give none"
            )
        shape, weights, origin = load_eagle3(drafter, about)
        files = export_eagle3(shape, weights, kind, dtype, origin)
    else:
        files = _export_eagle(Path(drafter), about, kind, dtype, policy)
    write_export(target, files)
    return files


def _export_eagle(
    drafter: Path, about: Mapping[str, Any], kind: Format, dtype: torch.dtype, policy: str | Path | None
) -> ExportFiles:
    config = ModelConfig.from_hf(about)
    check_eagle_format(config, kind)
    if policy is not None and kind != "hf":
        allowed = "engines share the policy's own embedding and LM head: only format hf takes copies"
        raise ConfigError.of("policy", str(policy), allowed)
    saved = load_drafter(drafter, config)
    tables = policy_tables(policy, config) if policy is not None else None
    origin = Origin(saved.policy_version, saved.trained_steps)
    return export_eagle(config, saved.weights, kind, dtype, origin, tables)


def read_about(drafter: Path) -> dict[str, Any]:
    """config.json of a drafter directory. Raises CheckpointError unless it is one of a kind that can be exported."""
    file = drafter / CONFIG
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
    kind = about.get("drafter") if isinstance(about, dict) else None
    if kind not in (KIND, KIND3):
        allowed = f"it must be '{KIND}' or '{KIND3}'"
        raise CheckpointError(f"{file}: drafter = {kind!r} is not a kind that can be exported: {allowed}")
    return dict(about)


def policy_tables(policy: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    """The policy's `embed_tokens.weight` and `lm_head.weight`. Raises CheckpointError for another shape's policy."""
    own = ModelConfig.from_hf(policy)
    if eagle_parameter_shapes(own) != eagle_parameter_shapes(config) or own.vocab_size != config.vocab_size:
        raise CheckpointError(f"{policy} is not the drafter's policy: its shape is another")
    names = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    found = {names[n]: t for n, t in iter_weights(policy, own) if n in names}
    return {"lm_head.weight": found["embed_tokens.weight"]} | found


def refuse_existing(out: Path) -> None:
    """Raises CheckpointError if `out` is there already."""
    if out.exists() or out.is_symlink():
        raise CheckpointError(
            f"{out} exists: an export is never written over something, give a new directory"
        )


def write_export(out: Path, files: ExportFiles) -> None:
    """Writes all files beside `out`, reads the tensors' headers back, and renames. Raises CheckpointError."""
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    need = _SPARE + sum(t.nbytes for tensors in files.tensors.values() for t in tensors.values())
    if (free := shutil.disk_usage(out.parent).free) < need:
        raise CheckpointError(f"{out.parent} has {free} bytes free, the export needs {need}")
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for name, tensors in files.tensors.items():
            save_file(tensors, str(scratch / name), metadata={"format": "pt"})
            _check_written(scratch / name, tensors)
        for name, value in files.json.items():
            (scratch / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (scratch / "README.md").write_text(files.card, encoding="utf-8")
        mode = (
            scratch / "README.md"
        ).stat().st_mode & 0o777  # the umask's; safetensors makes its files private
        for file in scratch.iterdir():
            file.chmod(mode)
            _sync(file)
        scratch.chmod(mode | (mode & 0o444) >> 2)  # who may read may enter
        _sync(scratch)
        os.rename(scratch, out)
    except OSError as e:
        raise CheckpointError(f"{out} cannot be written: {e}") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_written(file: Path, tensors: dict[str, Tensor]) -> None:
    wanted = {name: list(t.shape) for name, t in tensors.items()}
    try:
        with safe_open(str(file), "pt") as opened:
            found = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise CheckpointError(f"{file.name} was not written whole: {e}") from e
    if found != wanted:
        raise CheckpointError(f"{file.name} was not written whole: {sorted(set(wanted) ^ set(found))} differ")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

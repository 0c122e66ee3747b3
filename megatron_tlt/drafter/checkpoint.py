"""A drafter directory: `drafter.safetensors` and `config.json`.

config.json is that of the policy, with the drafter's entries before it: `drafter` (eagle or eagle3), `policy_version`,
`trained_steps`, `policy_fingerprint`, and for eagle3 `eagle3_layers` and `draft_vocab_size`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafter.fingerprint import other_policy_problem
from megatron_tlt.errors import CheckpointError, ConfigProblem
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.eagle3 import Eagle3Config, check_eagle3_tensors
from megatron_tlt.models.eagle.model import check_eagle_shapes, check_eagle_tensors
from megatron_tlt.models.loader import open_tensors

WEIGHTS, CONFIG = "drafter.safetensors", "config.json"
KIND, KIND3 = "eagle", "eagle3"


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    """All tensors of a drafter, on the CPU, and where they come from."""

    shape: ModelConfig | Eagle3Config  # of the policy; of an eagle3 drafter its own with the policy's in it
    weights: Mapping[str, Tensor]
    policy_version: int = 0  # of the policy whose hidden states it was last trained on
    trained_steps: int = 0
    fingerprint: Mapping[str, str] = field(default_factory=dict)  # `policy_fingerprint` of its policy

    def check(self) -> None:
        """Raises CheckpointError that names every missing, unexpected and misshapen tensor."""
        if isinstance(self.shape, Eagle3Config):
            check_eagle3_tensors(self.weights, self.shape)
        else:
            check_eagle_tensors(self.weights, self.shape)

    @property
    def policy(self) -> ModelConfig:
        """The policy's shape."""
        return self.shape.policy if isinstance(self.shape, Eagle3Config) else self.shape

    def to_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """The contents of config.json; `dtype` is that of the weights beside it."""
        shape, kind, own = self.shape, KIND, {}
        if isinstance(shape, Eagle3Config):
            kind, own = KIND3, {"eagle3_layers": shape.layers, "draft_vocab_size": shape.draft_vocab_size}
        origin = {"policy_version": self.policy_version, "trained_steps": self.trained_steps}
        made_for = {"policy_fingerprint": dict(self.fingerprint)}
        policy = self.policy.to_hf(str(dtype).removeprefix("torch."))
        return {"drafter": kind, **origin, **made_for, **own, **policy}


def save_drafter(
    directory: str | Path,
    shape: ModelConfig | Eagle3Config,
    weights: Mapping[str, Tensor],
    *,
    policy_version: int = 0,
    trained_steps: int = 0,
    fingerprint: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes a drafter directory; see `SavedDrafter`. An older drafter there is replaced.

    Raises CheckpointError for wrong tensors, before anything is written, and for a disk that is full.
    """
    drafter = SavedDrafter(shape, weights, policy_version, trained_steps, fingerprint or {})
    drafter.check()
    write_directory(
        Path(directory), {WEIGHTS: cast_tensors(weights, dtype)}, {CONFIG: drafter.to_json(dtype)}
    )


def load_drafter(directory: str | Path, policy: ModelConfig | None = None) -> SavedDrafter:
    """Reads a drafter directory; with `policy`, of kind eagle and for a policy of that shape.

    Raises CheckpointError for a directory that is none, and one that names every tensor that does not fit.
    """
    root = Path(directory)
    if policy is not None:
        check_drafter(root, policy)
    about = read_about(root)
    try:
        weights = load_file(str(root / WEIGHTS))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{root / WEIGHTS} cannot be read: {e}") from e
    version, steps = int(about.get("policy_version", 0)), int(about.get("trained_steps", 0))
    drafter = SavedDrafter(
        policy or _shape_of(about, root / CONFIG),
        weights,
        version,
        steps,
        about.get("policy_fingerprint", {}),
    )
    drafter.check()
    return drafter


def check_drafter(directory: str | Path, policy: ModelConfig) -> dict[str, Any]:
    """Raises CheckpointError unless rollouts by a policy of shape `policy` can draft with it; returns config.json.

    Reads config.json and the weights' header only.
    """
    root = Path(directory)
    about = read_about(root)
    if about["drafter"] != KIND:
        raise CheckpointError(
            f"{root / CONFIG} describes a drafter of kind {about['drafter']!r}; rollouts draft with kind {KIND!r} only "
            "(eagle3 is for export)"
        )
    with open_tensors(root / WEIGHTS) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    try:
        check_eagle_shapes(shapes, policy)
    except CheckpointError as e:
        raise CheckpointError(f"{root}: {e}") from e
    return about


def drafter_problems(
    speculation: SpeculationSection,
    policy: ModelConfig,
    model: str | Path,
    tokenizer: str | Path | None = None,
) -> list[ConfigProblem]:
    """What keeps the policy in `model`, of shape `policy`, from drafting with `drafter_path`. Reads no weights."""
    at, path = "rollout.speculation.drafter_path", speculation.drafter_path
    if not speculation.uses_eagle or path is None:
        return []
    try:
        made_for = check_drafter(path, policy).get("policy_fingerprint", {})
    except CheckpointError as error:
        return [ConfigProblem(at, path, str(error))]
    problem = None
    if not speculation.allow_other_policy:
        problem = other_policy_problem(at, path, made_for, model, tokenizer)
    return [] if problem is None else [problem]


def read_about(directory: Path) -> dict[str, Any]:
    """config.json of a drafter directory of either kind. Raises CheckpointError for any other directory."""
    file = directory / CONFIG
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{file} cannot be read: {e} (megatron-tlt drafter makes such a directory)"
        ) from e
    kind = about.get("drafter") if isinstance(about, dict) else None
    if kind not in (KIND, KIND3):
        raise CheckpointError(
            f"{file} describes no drafter: drafter = {kind!r} must be {KIND!r} or {KIND3!r}"
        )
    return dict(about)


def _shape_of(about: Mapping[str, Any], file: Path) -> ModelConfig | Eagle3Config:
    policy = ModelConfig.from_hf(about)
    if about["drafter"] == KIND:
        return policy
    layers, size = about.get("eagle3_layers"), about.get("draft_vocab_size")
    if not isinstance(layers, list) or not all(isinstance(i, int) for i in layers):
        raise CheckpointError(f"{file}: eagle3_layers = {layers!r} must be a list of three ids")
    if not isinstance(size, int):
        raise CheckpointError(f"{file}: draft_vocab_size = {size!r} must be an integer")
    return Eagle3Config.of(policy, tuple(layers), size)


def cast_tensors(named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous CPU copies; integers keep their type. Raises CheckpointError for a value that is not finite."""
    out = {}
    for name, tensor in named.items():
        stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        if not bool(torch.isfinite(stored).all()):
            raise CheckpointError(
                f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}"
            )
        out[name] = stored.contiguous().clone()
    return out


def write_directory(
    out: Path, tensors: Mapping[str, dict[str, Tensor]], texts: Mapping[str, dict[str, Any] | str]
) -> None:
    """Writes safetensors files, and JSON or text files, into `out`, which may exist. Raises CheckpointError.

    All are written beside their places first. config.json of an older directory is removed before the first file is
    replaced, and the new one comes last: a crash leaves a directory that is refused, never a mixture.
    """
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=out))
        try:
            for name, value in texts.items():
                text = value if isinstance(value, str) else json.dumps(value, indent=2) + "\n"
                (scratch / name).write_text(text, encoding="utf-8")
            for name, named in tensors.items():
                write_tensors(scratch / name, named, {"format": "pt"})
            (out / CONFIG).unlink(missing_ok=True)
            for name in sorted({*texts, *tensors}, key=lambda name: name == CONFIG):
                os.replace(scratch / name, out / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if is_new and not (out / CONFIG).exists():
                shutil.rmtree(out, ignore_errors=True)
    except OSError as e:
        raise CheckpointError(f"{out} cannot be written: {e}") from e


def write_tensors(file: Path, named: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes one safetensors file and waits for the disk. Raises OSError."""
    file.touch()
    mode = file.stat().st_mode  # the umask's; safetensors makes its files private
    try:
        save_file(dict(named), str(file), metadata=metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    file.chmod(mode)
    with file.open("rb") as handle:
        os.fsync(handle.fileno())

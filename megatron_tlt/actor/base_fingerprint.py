"""Which base a checkpoint of adapters belongs to, as short hashes of its embedding and of some of its layers.

Adapters never change the embedding: a base, and every model that adapters were merged into, have the same one. They
change matrices in every layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from megatron_tlt.actor.checkpoint_files import record_of
from megatron_tlt.actor.hf_names import slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader, locate
from megatron_tlt.config.model import ModelSection
from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.hashing import stamp
from megatron_tlt.drafters.fingerprint import digest_of, policy_fingerprint, spaced, stored_rows
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import weight_files
from megatron_tlt.models.hf.loader import open_tensors
from megatron_tlt.models.hf.peft import ADAPTER_WEIGHTS


def base_fingerprint(model: ModelSection, config: ModelConfig) -> str:
    """EMBEDDING-LAYERS of `model.path`, or -LAYERS of `model.megatron_path`; empty where these cannot be read.

    EMBEDDING: `policy_fingerprint`. LAYERS: of rows of all tensors in the first, the middle and the last layer, which
    are read whole from `model.megatron_path`, one tensor at a time, and once in a process as long as no file changes.
    """
    path = model.megatron_path
    try:
        layers = digest_of(_hf_rows(model.path, config)) if path is None else _megatron_layers(path, config)
    except (CheckpointError, KeyError, SafetensorError):
        return ""
    return f"{policy_fingerprint(model.path) if path is None else ''}-{layers}"


def weight_fingerprints(config: TrainingConfig) -> dict[str, tuple[str, str]]:
    """Path and fingerprint of the weights that each rank loads, by field: of some layers' rows, of adapters whole."""
    found = {
        field: (path, base_fingerprint(model, ModelConfig.from_hf(model.path)))
        for field, path, model in _models(config)
    }
    if (lora := config.actor.lora) is not None and (path := lora.adapter_path) is not None:
        found["actor.lora.adapter_path"] = path, record_of(Path(path) / ADAPTER_WEIGHTS).sha256
    return found


def reference_fingerprint(config: TrainingConfig) -> dict[str, str]:
    """Of the teacher's weights, or the reference policy's, by field; none where no KL is computed, or from no file."""
    if config.rl is None or not config.rl.algorithm.kl_weight:
        return {}
    field, _, model = _models(config)[-1]
    found = base_fingerprint(model, ModelConfig.from_hf(model.path))
    return {field: found} if found else {}


def _models(config: TrainingConfig) -> list[tuple[str, str, ModelSection]]:
    """Field, path and section of the policy, and of the teacher behind it."""
    model = config.model
    found = [("model.path", model.path, model)]
    if model.megatron_path is not None:
        found = [("model.megatron_path", model.megatron_path, model)]
    if config.rl is not None and (teacher := config.rl.algorithm.teacher) is not None:
        section = model.model_copy(update={"path": teacher, "megatron_path": None})
        found.append(("algorithm.teacher", teacher, section))
    return found


def _layers(config: ModelConfig) -> list[int]:
    return sorted({0, config.num_layers // 2, config.num_layers - 1})


def _hf_rows(path: str, config: ModelConfig) -> Iterator[Tensor]:
    files, opened = weight_files(Path(path)), cache(open_tensors)
    for layer in _layers(config):
        for name in config.layer_shapes(layer):
            stored = config.names_on_disk(f"model.layers.{layer}.{name}")  # of experts: one each
            for place in spaced(len(stored)):
                yield stored_rows(opened(files[stored[place]]), stored[place])


def _megatron_layers(path: str, config: ModelConfig) -> str:
    directory = locate(path)
    return _layers_of_stamp(directory, config, stamp(directory.iterdir()))


@cache
def _layers_of_stamp(directory: Path, config: ModelConfig, _stamp: Hashable) -> str:
    return digest_of(_megatron_rows(directory, config))


def _megatron_rows(directory: Path, config: ModelConfig) -> Iterator[Tensor]:
    source, layers = TorchDistReader(directory), _layers(config)
    for slot in slots(config, 1):
        for tensor in source.read(config, slot) if slot.layer in layers else ():
            rows = tensor.reshape(-1, *tensor.shape[-1:]) if tensor.ndim > 1 else tensor
            yield rows[spaced(len(rows))]

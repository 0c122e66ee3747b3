"""The weight files of a Hugging Face model directory, and whether they are what its config.json says.

A single `model.safetensors`, which wins as in transformers, or shards with `model.safetensors.index.json`. Names,
shapes and types come from the files' headers; the bytes of a tensor are read of a tied model's stored LM head only.

No torch here: `megatron-tlt check` looks for them without it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_tlt.config.json_reader import read_object_if_there
from megatron_tlt.errors import CheckpointError, ConfigProblem, shortened
from megatron_tlt.models.hf.config import EMBED, HEAD, ModelConfig
from megatron_tlt.models.hf.fields import DUAL_CHUNK, unread_fields

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")  # safetensors' words for the types that are read
_ADAPTER = "adapter_config.json"
_QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # ModelOpt, GPTQ, AWQ
_OTHER_FORMS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
_BLOCK = 1 << 24  # bytes of two tensors that are compared at once


def model_problems(directory: str | Path, config: ModelConfig | None, applied: str | None = None) -> list[str]:
    """Why a directory's weights cannot be read, or are not the whole of it. `config`: its config.json, if that is read.

    `applied`: the adapter that the run applies, which may be in the same directory.
    """
    root, problems = Path(directory), []
    if (root / _ADAPTER).exists() and (applied is None or not Path(applied).exists() or not root.samefile(applied)):
        problems.append(
            f"{root / _ADAPTER} describes an adapter that would not be applied (transformers applies it): "
            "move it to a directory of its own; actor.lora.adapter_path names one to train"
        )
    problems += [
        f"{root / name} says that the weights are quantized: only fp32, fp16 and bf16 weights are read"
        for name in _QUANTIZED
        if (root / name).exists()
    ]
    if config is not None:
        try:
            check_weights(root, config)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def model_warnings(directory: str | Path) -> list[str]:
    """What is left out of a model directory that can be read: weight files, and fields of config.json."""
    root = Path(directory)
    warnings = []
    read, unread = _indexed(root), []
    if (root / SINGLE).exists():
        is_stale = (root / INDEX).exists() and read != [SINGLE]
        read, unread = [SINGLE], [INDEX] if is_stale else []
    unread += sorted(file.name for file in root.glob("model-*-of-*.safetensors") if file.name not in read)
    if read and unread:
        words = f"the weights are read from {shortened(read)}, as transformers does"
        warnings.append(f"{root}: {words}; not read, and perhaps of an older model: {shortened(unread)}")
    return warnings + config_warnings(root / "config.json")


def config_warnings(file: Path) -> list[str]:
    """What is left out of a config.json that can be read."""
    fields = unread_fields(read_object_if_there(file))
    return [f"{file} sets fields that are not known, and not read: {shortened(fields)}"] if fields else []


def backend_problems(file: Path, backend: str) -> list[ConfigProblem]:
    """Fields of a config.json that can be read, by which the engine would compute another model than the actor."""
    if backend != "vllm" or not read_object_if_there(file).get(DUAL_CHUNK):
        return []
    why = f"must be 'embedded', or {DUAL_CHUNK} removed from {file}: vLLM attends by it, the actor attends in full"
    return [ConfigProblem("rollout.backend", backend, why)]


def shards(directory: str | Path) -> dict[str, Path] | None:
    """Tensor name -> file, from the index; None if the directory has a single file, whatever index is beside it.

    Opens no file of tensors. Raises CheckpointError naming the index, or the files, that are missing or unreadable.
    """
    root = Path(directory)
    if (root / SINGLE).exists():
        return None
    if not (root / INDEX).exists():
        others = sorted({file.name for form in _OTHER_FORMS for file in root.glob(form)})
        hint = f"; {shortened(others)} is not read: save the model with transformers as safetensors" if others else ""
        raise CheckpointError(f"{root} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        mapping = json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({file for file in mapping.values() if not (root / file).exists()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{root / INDEX} cannot be read: {e!r}") from e
    if absent:
        raise CheckpointError(f"{root / INDEX} names files that are missing: {shortened(absent)}")
    return {name: root / file for name, file in mapping.items()}


def _indexed(root: Path) -> list[str]:
    """The files that the index names; none without one that can be read."""
    try:
        return sorted(set(json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Stored name -> file, from the index or the single file. Raises CheckpointError naming the missing files."""
    indexed = shards(directory)
    if indexed is not None:
        return indexed
    single = Path(directory) / SINGLE
    return dict.fromkeys(_header(single), single)


def check_weights(directory: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Compares names, shapes and types on disk with `stored_shapes(config)`; returns stored name -> file.

    Rotary buffers are tolerated, and a stored `lm_head.weight` of a tied model where it is the embedding. Raises
    CheckpointError that names every file that cannot be read, or else missing, unexpected, misshapen and quantized
    tensors, all at once.
    """
    files = weight_files(directory)
    headers, unreadable = {}, []
    for file in sorted(set(files.values())):
        try:
            headers[file] = _header(file)
        except CheckpointError as error:
            unreadable.append(str(error))
    if unreadable:
        raise CheckpointError(shortened(unreadable, separator="; "))
    problems = list(_problems(files, headers, config))
    if not problems and config.tie_word_embeddings and HEAD in files and not _is_same(files, headers):
        problems.append(
            f"config.json says tie_word_embeddings, but the stored {HEAD} is not the embedding: say false there, or "
            "remove the tensor"
        )
    if problems:
        listed = shortened(problems, separator="; ")
        raise CheckpointError(f"weights in {directory} do not fit its config.json: {listed}")
    return files


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in config.parameter_shapes().items():
        stored = config.names_on_disk(name)
        rows = shape if len(stored) == 1 else (prod(shape[:-1]) // len(stored), shape[-1])
        shapes |= dict.fromkeys(stored, rows)
    return shapes


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether some exporters add the tensor and it carries no information."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == HEAD)


def prefix_hint(missing: Sequence[str], present: Collection[str]) -> str:
    """Words for the names of another program, which begin otherwise; empty where they do not."""
    for name in present:
        if name.endswith(f".{missing[0]}"):
            return f" (all begin with {name.removesuffix(missing[0])!r} there: remove it from the names)"
    head, _, rest = missing[0].partition(".")
    return f" (without {head + '.'!r} there: add it to the names)" if rest in present else ""


def _problems(
    files: Mapping[str, Path], headers: Mapping[Path, Mapping[str, Any]], config: ModelConfig
) -> Iterator[str]:
    """What names, shapes and types contradict."""
    wanted = stored_shapes(config)
    if missing := [name for name in wanted if name not in files]:
        yield f"missing: {shortened(missing)}{prefix_hint(missing, files)}"
    if extra := [name for name in files if name not in wanted and not is_ignorable(name, config)]:
        yield f"unexpected: {shortened(extra)}"
    for file, header in headers.items():
        here = [name for name, place in files.items() if place == file]
        if absent := [name for name in here if name not in header]:
            yield f"in the index but not in {file.name}: {shortened(absent)}"
        if unlisted := [name for name in header if files.get(name) != file and not name.endswith(".inv_freq")]:
            yield f"{file.name} holds tensors that the index does not give it: {shortened(unlisted)}"
        for name in here:
            stored = header.get(name)
            if name not in wanted or stored is None:
                continue
            if tuple(stored["shape"]) != wanted[name]:
                yield f"{name} has shape {tuple(stored['shape'])}, the configuration says {wanted[name]}"
            if stored["dtype"] not in FLOATS:
                yield f"{name} is stored as {stored['dtype']}; only {', '.join(FLOATS)} can be read"


def _header(file: Path) -> dict[str, Any]:
    """Name -> dtype, shape and data_offsets of every tensor. Raises CheckpointError if the file is no safetensors."""
    try:
        with safe_open(str(file), framework="np"):  # compares the header's offsets with the file's size
            pass
        with file.open("rb") as stream:
            header: dict[str, Any] = json.loads(stream.read(_header_size(stream.read(8))))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated, or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header


def _header_size(first: bytes) -> int:
    return int.from_bytes(first, "little")


def _is_same(files: Mapping[str, Path], headers: Mapping[Path, Mapping[str, Any]]) -> bool:
    """Whether LM head and embedding are the same bytes."""
    head, embedding = (headers[files[name]][name] for name in (HEAD, EMBED))
    if (head["dtype"], head["shape"]) != (embedding["dtype"], embedding["shape"]):
        return False
    pairs = zip(_blocks(files[HEAD], head), _blocks(files[EMBED], embedding), strict=True)
    return all(a == b for a, b in pairs)


def _blocks(file: Path, stored: Mapping[str, Any]) -> Iterator[bytes]:
    """The bytes of a tensor."""
    start, end = stored["data_offsets"]
    with file.open("rb") as stream:
        first = 8 + _header_size(stream.read(8))
        stream.seek(first + start)
        for left in range(end - start, 0, -_BLOCK):
            yield stream.read(min(left, _BLOCK))

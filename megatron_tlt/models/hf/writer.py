"""Writing Hugging Face model directories: safetensors files of whole parameters, their index, config.json.

Experts are stored one by one (see `experts`). Every header follows from the shapes alone, so tensors are
written as they come, one in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_tlt.errors import CheckpointError, shortened
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.files import INDEX, SINGLE, is_ignorable, stored_shapes
from megatron_tlt.observe.files import replace_files, sync

CONFIG = "config.json"
_DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16"}


class TensorFile:
    """One safetensors file, as safetensors writes it: header length (8 bytes), JSON header, tensors, by name.

    A context manager; parameters may be written in any order.
    """

    def __init__(self, file: Path, config: ModelConfig, names: Iterable[str], dtype: torch.dtype):
        """`names`: the parameters of `config` that the file holds, of `dtype`."""
        self._config, self._dtype = config, dtype
        shapes = stored_shapes(config)
        stored = sorted(stored_names(config, names))
        ends = list(accumulate(prod(shapes[name]) * dtype.itemsize for name in stored))
        self._starts = dict(zip(stored, [0, *ends], strict=False))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, end in zip(stored, ends, strict=True):
            offsets = [self._starts[name], end]
            header[name] = {"dtype": _DTYPE_WORDS[dtype], "shape": list(shapes[name]), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = file
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._first = self._stream.tell()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a parameter, of a stack of experts each one."""
        stored = self._config.names_on_disk(name)
        parts = (tensor,) if len(stored) == 1 else tensor.flatten(0, 1).chunk(len(stored))
        for stored_name, part in zip(stored, parts, strict=True):
            whole = part.detach().to("cpu", self._dtype).contiguous()
            self._stream.seek(self._first + self._starts[stored_name])
            self._stream.write(whole.view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file once it is on the disk."""
        self._stream.close()
        sync(self._file)


def stored_names(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """The stored tensors of some parameters, in order."""
    return [stored for name in names for stored in config.names_on_disk(name)]


def split_into_files(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of the items of each file, in order: at most `limit` bytes, or a larger one by itself."""
    files: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(number)
        held += size
    return files


def weight_file_name(number: int, count: int) -> str:
    """The name of the file `number` of `count`, as `transformers` writes it."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, config: ModelConfig, files: Sequence[Sequence[str]], num_bytes: int) -> None:
    """Writes the index, tensor to file, of parameters by file; nothing for a single file."""
    if len(files) == 1:
        return
    named = [(weight_file_name(number, len(files)), names) for number, names in enumerate(files)]
    weight_map = {stored: file for file, names in named for stored in stored_names(config, names)}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_hf(
    directory: str | Path,
    config: ModelConfig,
    named_tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 4 << 30,
    hf_config: dict[str, Any] | None = None,
) -> None:
    """Writes safetensors (several above `max_shard_bytes`), the index if there are several, and config.json.

    `hf_config`: entries of the config.json that `config` was read from, all of which are kept; default: those of
    `config`. Holds one tensor in memory. An existing model in `directory` is replaced only once the new one is
    complete on disk; other files there (tokenizer, ...) stay. Raises CheckpointError on missing, extra or
    misshapen tensors.
    """
    wanted = config.parameter_shapes()
    names = list(wanted)
    sizes = [prod(shape) * dtype.itemsize for shape in wanted.values()]
    files = [[names[i] for i in held] for held in split_into_files(sizes, max_shard_bytes)]
    with replace_files(Path(directory), CONFIG, stale=("*.safetensors", INDEX)) as scratch:
        with ExitStack() as stack:
            file_of: dict[str, TensorFile] = {}
            for number, held in enumerate(files):
                file = TensorFile(scratch / weight_file_name(number, len(files)), config, held, dtype)
                file_of |= dict.fromkeys(held, stack.enter_context(file))
            for name, tensor in named_tensors:
                if is_ignorable(name, config):
                    continue
                if name in wanted and name not in file_of:
                    raise CheckpointError(f"cannot save {directory}: {name} came twice")
                if tuple(tensor.shape) != wanted.get(name):
                    raise CheckpointError(
                        f"{name} has shape {tuple(tensor.shape)}, the configuration says {wanted.get(name)}"
                    )
                file_of.pop(name).write(name, tensor)
        if file_of:
            raise CheckpointError(f"cannot save {directory}: missing {shortened(list(file_of))}")
        write_index(scratch, config, files, sum(sizes))
        text = config_with_dtype(config.to_hf() if hf_config is None else hf_config, dtype)
        (scratch / CONFIG).write_text(text, encoding="utf-8")


def config_with_dtype(hf_config: dict[str, Any], dtype: torch.dtype) -> str:
    """The text of a config.json that names the type of the weights beside it, under the keys it used before."""
    keys = [key for key in ("dtype", "torch_dtype") if key in hf_config] or ["torch_dtype"]
    word = str(dtype).removeprefix("torch.")
    return json.dumps({**hf_config, **dict.fromkeys(keys, word)}, indent=2) + "\n"


def write_tensors(file: Path, named: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes one safetensors file of tensors of any type onto the disk. Raises OSError."""
    file.touch()
    mode = file.stat().st_mode  # the umask's; safetensors makes its files private
    try:
        save_file(dict(named), str(file), metadata=metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    file.chmod(mode)
    sync(file)

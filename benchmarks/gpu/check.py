"""What the parts of `gpu_check.py` share: device, sizes, policies that are made here, and timing."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bounds import Device, data_sheet
from megatron_tlt.config.load import load_config
from megatron_tlt.config.root import Config
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "assets/demo-policy"
TINY = ModelConfig("qwen2", 288, 64, 2, 4, 2, 16, 128, qkv_bias=True, tie_word_embeddings=True)
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Check:
    """One run. `smoke`: tiny sizes, every line; its figures mean nothing."""

    device: torch.device
    smoke: bool
    recipe: Path
    work: Path  # policies are made here once and shared by the parts

    @property
    def is_cuda(self) -> bool:
        """Whether this measures a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def dtype_name(self) -> str:
        """As `rollout.dtype` names it."""
        return "bf16" if self.is_cuda else "fp32"

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The one-GPU recipe."""
        return load_config(self.recipe, list(overrides))

    def shape(self) -> ModelConfig:
        """The recipe's policy; a tiny one in a smoke run."""
        if self.smoke:
            return TINY
        wanted = self.config().model.architecture
        assert wanted is not None, f"{self.recipe} has no model.architecture"
        same = {field.name: getattr(wanted, field.name) for field in fields(ModelConfig) if hasattr(wanted, field.name)}
        layout = {"qk_norm": wanted.family == "qwen3", "qkv_bias": wanted.family == "qwen2"}
        return ModelConfig(**same, **layout, max_position_embeddings=MAX_POSITIONS)

    def random_policy(self, of: ModelConfig | None = None) -> Path:
        """A Hugging Face directory with random weights of `shape()`, or `of`, and a tokenizer of its vocabulary."""
        config = of or self.shape()
        folder = self.work / f"policy-{config.family}"
        if (folder / "config.json").is_file():
            return folder
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
            if len(size) == 1:
                return torch.full(size, float("norm" in name), dtype=self.dtype)
            values = torch.randn(size, generator=generator, device=self.device)
            return values.mul_(size[-1] ** -0.5).to("cpu", self.dtype)

        shapes = config.parameter_shapes().items()
        save_hf(folder, config, ((name, draw(name, size)) for name, size in shapes), self.dtype)
        copy_tokenizer(folder, config.vocab_size)
        return folder

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def events(self, call: Callable[[], object]) -> list[str]:
        """Names of the kernels that a call launches, and of CUDA's functions; on a CPU of operators."""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.is_cuda else [])
        with profile(activities=activities) as profiled:
            call()
            self.synchronize()
        wanted = "CUDA" if self.is_cuda else "CPU"
        return [e.name for e in profiled.events() if str(e.device_type).endswith(wanted) or e.name.startswith("cuda")]

    def seconds(self, call: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> list[float]:
        """Seconds of each of `repeats` calls, the device waited for, after `warm_up` calls."""
        taken = []
        for _ in range(repeats + warm_up):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - started)
        return taken[warm_up:]

    def peaks(self) -> Device:
        """The device's data sheet; of a device that has none here, what a copy and a matrix product reach."""
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"
        return data_sheet(name) or measured_peaks(self)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Matrices that keep a row's size, vectors near 1."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator, device=device) * size[-1] ** -0.5 + (len(size) == 1)
        for name, size in shapes.items()
    }


def copy_tokenizer(folder: Path, vocab_size: int) -> None:
    """The demo policy's tokenizer with a word for every further token id, so that any response has a text."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (TOKENIZER / name).is_file():
            shutil.copy(TOKENIZER / name, folder)
    tree = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tree["added_tokens"])}
    vocab |= {f"w{i}": i for i in range(vocab_size) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def measured_peaks(check: Check) -> Device:
    """Bytes a second of a copy (read and written) and operations a second of a square product of random matrices."""
    size, n = (1 << 30, 8192) if check.is_cuda else (4 << 20, 512)
    source = torch.ones(size, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=check.device).to(check.dtype) for _ in range(2))
    copy = statistics.median(check.seconds(lambda: target.copy_(source)))
    product = statistics.median(check.seconds(lambda: a @ b))
    return Device(2 * size / copy, 2 * n**3 / product)


def reason(error: BaseException) -> str:
    """One line: the error's class and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

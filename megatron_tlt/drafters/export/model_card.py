"""README.md of an exported drafter: its kind, its needs, the command to serve it, and which engines were tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_tlt.drafters.base import ENGINES, Format
from megatron_tlt.drafters.registry import KINDS

if TYPE_CHECKING:
    import torch

    from megatron_tlt.drafters.base import SavedDrafter

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
`config.json` has the policy's shape. Tensors that it shares with the policy (embedding, LM head) are not here.
"""

_SGLANG = """
For SGLang. {about}Serve with

    python -m sglang.launch_server --model-path POLICY --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path THIS_DIRECTORY \\
        {flags}
"""

_VLLM = """
For vLLM. {about}Serve with

    vllm serve POLICY --speculative-config \\
        '{{"method": "{method}", "model": "THIS_DIRECTORY", "num_speculative_tokens": {length}}}'
"""

_TRTLLM = """
For TensorRT-LLM's PyTorch backend, EAGLE-3 one-model. The layers that the drafter reads are an argument there
(`speculative.json`), and without `allow_advanced_sampling` the temperature is ignored:

    EagleDecodingConfig(max_draft_len=4, speculative_model="THIS_DIRECTORY", eagle3_one_model=True,
                        allow_advanced_sampling=True, eagle3_layers_to_capture={{{layers}}})
"""

_USAGE = {"sglang": _SGLANG, "vllm": _VLLM, "trtllm": _TRTLLM}

_UNTRIED = """
**Not tried**: names and keys follow {engine}'s loader as read; this layout has not been run in {engine}.
"""
_TRIED = """
Exports of this kind are served by vLLM 0.32's CPU build in a test (fp32) and accepted as often as in our engine; this
directory itself has not been run, and none on a GPU.
"""


def model_card(drafter: SavedDrafter, form: Format, dtype: torch.dtype) -> str:
    """The README.md of an export."""
    config, policy = drafter.config, drafter.config.policy
    kind, name = KINDS[config.kind], config.kind
    card = _HEAD.format(
        kind=name,
        title=kind.title,
        paper=kind.paper,
        policy=f"{policy.family}, {policy.num_layers} layers, hidden size {policy.hidden_size}, "
        f"vocabulary {policy.vocab_size}",
        version=drafter.policy_version,
        steps=drafter.trained_steps,
        dtype=str(dtype).removeprefix("torch."),
        format=form,
    )
    card += kind.card_rows(config)
    if form == "hf":
        return card + _HF
    layers, options = ", ".join(map(str, config.aux_layers)), kind.serving_options(config)
    algorithm = str(options["method"]).upper()
    card += _USAGE[form].format(about=kind.serving_notes(form), algorithm=algorithm, layers=layers, **options)
    return card + (_TRIED if form in kind.was_served_by(config) else _UNTRIED.format(engine=ENGINES[form]))

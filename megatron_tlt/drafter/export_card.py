"""README.md of an exported drafter: what it is, what it needs, how it is served, and that nobody has tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron_tlt.models.config import ModelConfig

_HEAD = """---
tags:
- speculative-decoding
- {tag}
---
# {title}

A draft model for speculative decoding, trained by Megatron-TLT. It is no language model by itself.

| | |
|---|---|
| kind | {kind} |
| policy | {policy} |
| trained on hidden states of policy version | {version} |
| optimizer steps | {steps} |
| weights | {dtype} |
| format | {format} |
"""

_EAGLE_HF = """
`drafter.safetensors` and `config.json` are a drafter directory of Megatron-TLT (`rollout.speculation.drafter_path`);
`config.json` has the policy's shape. {tables}

    x_s = fc [E(token_s) ; h_(s-1)]          fc.weight [H, 2H], no bias
    o_s = layer(x_s)                         one decoder layer of the policy's family, `layer.*`, without the norm
                                             before its attention; causal over s >= 1; rotary position s
    logits of token s+1 = LM head (o_s)      no norm in between

h is the policy's hidden state after its final norm. To go on, draft token s+1 and use o_s in place of h_s.
"""
_TABLES = {
    False: "Embedding E and LM head are the policy's and are not here.",
    True: "Copies of the policy's E and LM head are in `policy_tables.safetensors` (`embed_tokens.weight`, "
    "`lm_head.weight`).",
}

_EAGLE_SGLANG = """
For SGLang ({architecture}). Embedding and LM head are the policy's and are not here; `fc.bias` is zero because SGLang
gives fc a bias. Serve with

    python -m sglang.launch_server --model-path POLICY --speculative-algorithm EAGLE \\
        --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps 4 --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens 5
"""

_EAGLE_VLLM = """
For vLLM (EagleLlamaForCausalLM). Embedding and LM head are the policy's and are not here: run with pipeline parallel
size 1. `method` must be given, as vLLM otherwise guesses it from the directory's name. Serve with

    vllm serve POLICY --speculative-config \\
        '{{"method": "eagle", "model": "THIS_DIRECTORY", "num_speculative_tokens": 4}}'
"""

_UNTRIED = """
**Not tried**: names and keys follow {engine}'s loader as read; this layout has not been run in {engine}.
"""


def eagle_card(
    config: ModelConfig, kind: str, dtype: torch.dtype, version: int, steps: int, tables: bool
) -> str:
    """The card of a drafter of kind eagle."""
    head = card_head("EAGLE drafter", "eagle", "eagle (EAGLE-1)", config, kind, dtype, version, steps)
    if kind == "hf":
        return head + _EAGLE_HF.format(tables=_TABLES[tables])
    if kind == "sglang":
        architecture = "Qwen2ForCausalLMEagle" if config.qkv_bias else "LlamaForCausalLMEagle"
        return head + _EAGLE_SGLANG.format(architecture=architecture) + _UNTRIED.format(engine="SGLang")
    return head + _EAGLE_VLLM.format() + _UNTRIED.format(engine="vLLM")


def card_head(
    title: str,
    tag: str,
    kind: str,
    config: ModelConfig,
    form: str,
    dtype: torch.dtype,
    version: int,
    steps: int,
) -> str:
    """The part that all cards share."""
    policy = (
        f"{config.family}, {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}"
    )
    return _HEAD.format(
        title=title,
        tag=tag,
        kind=kind,
        policy=policy,
        version=version,
        steps=steps,
        dtype=str(dtype).removeprefix("torch."),
        format=form,
    )


def untried(engine: str) -> str:
    """The card's last line."""
    return _UNTRIED.format(engine=engine)

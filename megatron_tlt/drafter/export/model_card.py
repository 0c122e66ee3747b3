"""README.md of an exported drafter: what it is, what it needs, how it is served, and that nobody has tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron_tlt.models.config import ModelConfig
    from megatron_tlt.models.eagle.eagle3 import Eagle3Config

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


_EAGLE3_HF = """
`drafter.safetensors` and `config.json` are a drafter directory of Megatron-TLT; `config.json` has the policy's shape.
The policy's embedding E is not here.

    g_s = fc [f_a ; f_b ; f_c]_s                   outputs of policy layers {layers} (from 0) at s, [3H]
    x_s = [rms(E(token_s)) ; rms(g_(s-1))]         input_layernorm and hidden_norm of `midlayer`, [2H]
    r = g_(s-1) + attention(x_s)                   causal over s >= 1; rotary position s
    o_s = r + mlp(rms(r))
    logits of token s+1 = lm_head rms(o_s)         `norm`; draft token i is the policy's token i + d2t[i]

To go on, draft token s+1 and use o_s in place of g_s.
"""

_EAGLE3_SGLANG = """
For SGLang (LlamaForCausalLMEagle3). Serve with

    python -m sglang.launch_server --model-path POLICY --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path THIS_DIRECTORY --speculative-num-steps 4 --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens 5
"""

_EAGLE3_VLLM = """
For vLLM (Eagle3LlamaForCausalLM). Serve with

    vllm serve POLICY --speculative-config \\
        '{"method": "eagle3", "model": "THIS_DIRECTORY", "num_speculative_tokens": 4}'
"""

_EAGLE3_TRTLLM = """
For TensorRT-LLM's PyTorch backend, EAGLE-3 one-model. The layers that the drafter reads are an argument there
(`speculative.json`), and without `allow_advanced_sampling` the temperature is ignored:

    EagleDecodingConfig(max_draft_len=4, speculative_model="THIS_DIRECTORY", eagle3_one_model=True,
                        allow_advanced_sampling=True, eagle3_layers_to_capture={layers})
"""


def eagle3_card(config: Eagle3Config, kind: str, dtype: torch.dtype, version: int, steps: int) -> str:
    """The card of a drafter of kind eagle3."""
    head = card_head(
        "EAGLE-3 drafter", "eagle3", "eagle3 (EAGLE-3)", config.policy, kind, dtype, version, steps
    )
    size = config.draft_vocab_size
    head += f"| reads the outputs of policy layers | {', '.join(map(str, config.layers))} (from 0) |\n"
    head += f"| drafts | {size} of the policy's {config.policy.vocab_size} tokens |\n"
    if kind == "hf":
        return head + _EAGLE3_HF.format(layers=", ".join(map(str, config.layers)))
    if kind == "sglang":
        return head + _EAGLE3_SGLANG + untried("SGLang")
    if kind == "vllm":
        return head + _EAGLE3_VLLM + untried("vLLM")
    captured = "{" + ", ".join(map(str, config.layers)) + "}"
    return head + _EAGLE3_TRTLLM.format(layers=captured) + untried("TensorRT-LLM")

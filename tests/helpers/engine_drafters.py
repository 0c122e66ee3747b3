"""How three engines read a drafter directory, rewritten from their loaders' rules: names, shapes, config keys.

Nothing of the package is used here. As in the engines, parameters start random, a tensor that the loader does not know
is skipped or refused as that engine does it, and one that the file lacks stays random. Sources and their versions:
docs/guides/export_drafter.md.

Legend: n pairs of one sequence, H hidden size, D head size, V vocabulary, Vd the drafter's, L policy layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention(nn.Module):
    def __init__(self, raw: dict[str, Any], inputs: int, head_dim: int, qkv_bias: bool, o_bias: bool):
        super().__init__()
        heads, kv = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.head_dim, self.group = head_dim, heads // kv
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=qkv_bias)
        self.k_proj, self.v_proj = (nn.Linear(inputs, kv * head_dim, bias=qkv_bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_dim, raw["hidden_size"], bias=o_bias)
        # The keys that engines before transformers 5 read.
        rope = {"rope_type": "default"} | (raw["rope_scaling"] or {}) | {"rope_theta": raw["rope_theta"]}
        config = LlamaConfig(
            hidden_size=raw["hidden_size"],
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=raw["max_position_embeddings"],
            rope_parameters=rope,
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, positions[None]))
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    """Both kinds: `wide` is EAGLE-3's first layer, which reads [norm(embedding) ; norm(hidden)]."""

    def __init__(self, raw: dict[str, Any], wide: bool, head_dim: int, qkv_bias: bool, o_bias: bool):
        super().__init__()
        h, eps = raw["hidden_size"], raw["rms_norm_eps"]
        self.self_attn = Attention(raw, 2 * h if wide else h, head_dim, qkv_bias, o_bias)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=h, intermediate_size=raw["intermediate_size"]))
        self.post_attention_layernorm = nn.RMSNorm(h, eps)
        if wide:
            self.input_layernorm, self.hidden_norm = nn.RMSNorm(h, eps), nn.RMSNorm(h, eps)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        residual = residual + self.self_attn(x, positions)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Drafter(nn.Module):
    """What the three have in common. `policy_head` [V, H] is what an engine shares with the drafter."""

    weights_file = "model.safetensors"

    def __init__(self, directory: Path):
        super().__init__()
        self.raw = json.loads((directory / "config.json").read_text())
        AutoConfig.from_pretrained(directory)  # every engine opens it with transformers
        (self.architecture,) = self.raw["architectures"]
        assert self.raw["num_hidden_layers"] == 1
        assert not self.raw["tie_word_embeddings"], "the engine would tie or delete the drafter's head"
        torch.manual_seed(0)
        self.build(self.raw)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        for name, tensor in load_file(directory / self.weights_file).items():
            self.load(name, tensor)
        self.requires_grad_(False)

    def build(self, raw: dict[str, Any]) -> None:
        raise NotImplementedError

    def load(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError

    def put(self, name: str, tensor: Tensor) -> bool:
        """Into the parameter of that name; whether there is one. A wrong shape raises."""
        parameter = dict(self.named_parameters()).get(name)
        if parameter is None:
            return False
        if tensor.shape != parameter.shape:
            raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
        parameter.data.copy_(tensor)
        return True

    def combine(self, features: Tensor) -> Tensor:
        """What a policy's features [n, ..] are when the drafter reads them."""
        return features

    def aux_layers(self, num_layers: int) -> list[int]:
        """Policy layers (counted from 0) whose OUTPUT the engine collects."""
        raise NotImplementedError

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """n pairs -> (what the head reads, what the next step is fed), [n, H] each."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, policy_head: Tensor) -> Tensor:
        """[V] of one row [H]."""
        raise NotImplementedError


class Eagle1(Drafter):
    """`fc` and `layers.0`; embedding and head are the policy's."""

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.model["fc"](torch.cat([embedded, hidden], -1))
        out = self.model["layers"][0](x, x, positions)
        return out, out

    def logits(self, hidden: Tensor, policy_head: Tensor) -> Tensor:
        return policy_head @ hidden


class SglangEagle1(Eagle1):
    def build(self, raw: dict[str, Any]) -> None:
        h, heads = raw["hidden_size"], raw["num_attention_heads"]
        if self.architecture == "Qwen2ForCausalLMEagle":
            layer = Layer(raw, False, h // heads, qkv_bias=True, o_bias=False)
        elif self.architecture == "LlamaForCausalLMEagle":
            bias = raw.get("attention_bias", False) or raw.get("bias", False)
            layer = Layer(raw, False, raw.get("head_dim", h // heads), bias, bias)
        else:
            raise ValueError(f"Model architectures {self.architecture} are not supported")
        fc = nn.Linear(2 * h, h)
        self.model = nn.ModuleDict({"fc": fc, "layers": nn.ModuleList([layer])})

    def load(self, name: str, tensor: Tensor) -> None:
        if "lm_head" not in name:
            self.put("model." + name, tensor)  # unknown: a warning in the log


class VllmEagle1(Eagle1):
    def build(self, raw: dict[str, Any]) -> None:
        if f"Eagle{self.architecture}" != "EagleLlamaForCausalLM":
            raise ValueError(f"Eagle{self.architecture} is not supported")
        h, heads = raw["hidden_size"], raw["num_attention_heads"]
        o_bias = raw.get("attention_bias", False) or raw.get("bias", False)
        qkv_bias = raw.get("qkv_bias", o_bias)
        layer = Layer(raw, False, raw.get("head_dim") or h // heads, qkv_bias, o_bias)
        fc = nn.Linear(2 * h, h, bias=False)
        self.model = nn.ModuleDict({"fc": fc, "layers": nn.ModuleList([layer])})

    def load(self, name: str, tensor: Tensor) -> None:
        if not self.put("model." + name, tensor):
            raise ValueError(f"There is no module or parameter named {name}")


class Eagle3(Drafter):
    """`fc` over three layers' outputs, `midlayer`, `norm`, own `lm_head` over Vd tokens, `d2t` offsets."""

    def build(self, raw: dict[str, Any]) -> None:
        self.check_architecture()
        h, heads = raw["hidden_size"], raw["num_attention_heads"]
        self.draft_vocab = raw["draft_vocab_size"]
        bias = raw["attention_bias"]
        layer = Layer(raw, True, raw.get("head_dim") or h // heads, bias, bias)
        fc = nn.Linear(3 * h, h, bias=raw.get("bias", False))
        norm = nn.RMSNorm(h, raw["rms_norm_eps"])
        self.model = nn.ModuleDict({"fc": fc, "midlayer": layer, "norm": norm})
        self.lm_head = nn.Linear(h, self.draft_vocab, bias=False)
        self.offsets: Tensor | None = None

    def check_architecture(self) -> None:
        if self.architecture not in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
            raise ValueError(f"{self.architecture} is not supported")

    def combine(self, features: Tensor) -> Tensor:
        return self.model["fc"](features)

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.model["midlayer"]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        out = layer(x, hidden, positions)
        return self.model["norm"](out), out

    def logits(self, hidden: Tensor, policy_head: Tensor) -> Tensor:
        own = self.lm_head(hidden)
        if self.offsets is None:
            assert len(own) == len(policy_head)
            return own
        out = torch.full((len(policy_head),), float("-inf"))
        out[torch.arange(self.draft_vocab) + self.offsets] = own
        return out

    def default_layers(self, num_layers: int) -> list[int]:
        if num_layers <= 5:
            raise ValueError("Not enough hidden layers for default EAGLE3 capture")
        return [1, num_layers // 2 - 1, num_layers - 4]


class SglangEagle3(Eagle3):
    def check_architecture(self) -> None:
        if self.architecture != "LlamaForCausalLMEagle3":
            raise ValueError(f"{self.architecture} is not supported")

    def load(self, name: str, tensor: Tensor) -> None:
        if "d2t" in name:
            self.offsets = tensor
        elif "t2d" not in name:
            _ = self.put(name, tensor) or self.put("model." + name, tensor)  # unknown: skipped without a word

    def aux_layers(self, num_layers: int) -> list[int]:
        given = self.raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        inputs = [i + 1 for i in given] if given else [i + 1 for i in self.default_layers(num_layers)]
        return [i - 1 for i in inputs]  # it collects what enters layer i


class VllmEagle3(Eagle3):
    def load(self, name: str, tensor: Tensor) -> None:
        if "t2d" in name:
            return
        if "d2t" in name:
            if self.draft_vocab == self.raw["vocab_size"]:
                raise ValueError("d2t of a drafter with the whole vocabulary")
            self.offsets = tensor
            return
        name = name.replace("midlayer.", "layers.0.").replace("layers.0.", "midlayer.")
        if not self.put(name if "lm_head" in name else "model." + name, tensor):
            raise KeyError(name)

    def aux_layers(self, num_layers: int) -> list[int]:
        config = self.raw.get("eagle_config") or {}
        key = "eagle_aux_hidden_state_layer_ids"
        given = self.raw.get(key) or config.get(key)
        after = sorted(set(given)) if given else [i + 1 for i in self.default_layers(num_layers)]
        return [k - 1 for k in after]  # it collects the stream after k layers


class TrtllmEagle3(Eagle3):
    """Layer ids are the caller's argument there: the export has them in `speculative.json`."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.arguments = json.loads((directory / "speculative.json").read_text())

    def check_architecture(self) -> None:
        if "EAGLE3" + self.architecture.replace("Eagle3", "") != "EAGLE3LlamaForCausalLM":
            raise ValueError(f"{self.architecture} is not supported")

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "d2t":
            if self.draft_vocab != self.raw["vocab_size"]:
                self.offsets = tensor.to(torch.int32)
        elif name == "lm_head.weight":
            assert self.put(name, tensor)
        else:
            self.put("model." + name, tensor)  # modules it does not have are not looked at

    def aux_layers(self, num_layers: int) -> list[int]:
        given = self.arguments.get("eagle3_layers_to_capture")
        return sorted(given) if given else self.default_layers(num_layers)


def chain(
    engine: Drafter,
    tokens: Tensor,
    features: Tensor,
    embed: Tensor,
    head: Tensor,
    base: int,
    steps: int,
) -> Tensor:
    """Logits [steps, V] of a draft from place `base` that is fed `tokens`.

    As in the engines, the pair of token i and the policy's features [T, ..] of place i - 1 is at position i - 1.
    """
    hidden, out = engine.combine(features[:base]), []
    for step in range(steps):
        count = base + step
        read, fed = engine.run(embed[tokens[1 : count + 1]], hidden, torch.arange(count))
        out.append(engine.logits(read[-1], head))
        hidden = torch.cat([hidden, fed[-1:]])
    return torch.stack(out)


EAGLE = {"sglang": SglangEagle1, "vllm": VllmEagle1}
EAGLE3 = {"sglang": SglangEagle3, "trtllm": TrtllmEagle3, "vllm": VllmEagle3}

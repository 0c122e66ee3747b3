"""How three engines read a drafter directory, rewritten from their loaders' rules: names, shapes, config keys.

As in the engines, parameters start random, a tensor that the loader does not know is skipped or refused as that engine
does it, and one that the file lacks stays random. What is computed with them is `pairs.expected`, which all three have
in common. Sources and their versions: docs/guides/export_drafter.md.

Legend: H hidden size, V vocabulary, Vd the drafter's, L policy layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from megatron_tlt.models.hf.config import ModelConfig, RopeScaling
from tests.helpers.pairs import expected
from tests.helpers.tiny_models import random_tensors

_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Drafter:
    """What the engines have in common: sizes from config.json, tensors by name."""

    architectures: tuple[str, ...]
    at: str  # what `expected` calls the layer
    has_own_head = False

    def __init__(self, directory: Path):
        raw = self.raw = json.loads((directory / "config.json").read_text())
        AutoConfig.from_pretrained(directory)  # every engine opens it with transformers
        (self.architecture,) = raw["architectures"]
        if self.architecture not in self.architectures:
            raise ValueError(f"{self.architecture} is not supported")
        assert raw["num_hidden_layers"] == 1
        assert not raw["tie_word_embeddings"], "the engine would tie or delete the drafter's head"
        self.offsets: Tensor | None = None
        self.draft_vocab = raw["draft_vocab_size"] if self.has_own_head else raw["vocab_size"]
        self.weights = dict(random_tensors(self.shapes(*self.sizes()), seed=99))
        for name, tensor in load_file(directory / "model.safetensors").items():
            self.load(name, tensor)

    def sizes(self) -> tuple[int, bool, bool, bool]:
        """Head size; whether q, k, v, whether o and whether fc have biases."""
        raise NotImplementedError

    def load(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError

    def aux_layers(self, num_layers: int) -> list[int]:
        """Policy layers (counted from 0) whose OUTPUT the engine collects."""
        raise NotImplementedError

    def shapes(self, head_dim: int, qkv_bias: bool, o_bias: bool, fc_bias: bool) -> dict[str, tuple[int, ...]]:
        """Of all parameters. The layer's first product reads [norm(embedding) ; norm(hidden)] in EAGLE-3."""
        raw, h = self.raw, self.raw["hidden_size"]
        q, kv = (raw[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
        rope = raw["rope_scaling"]  # the keys that engines before transformers 5 read
        scaling = RopeScaling(*(rope[name] for name in _ROPE)) if rope else None
        heads = (raw["num_attention_heads"], raw["num_key_value_heads"], head_dim, raw["intermediate_size"])
        self.layer = ModelConfig(
            *("llama", raw["vocab_size"], h, 1, *heads),
            rope_theta=raw["rope_theta"],
            rope_scaling=scaling,
            rms_norm_eps=raw["rms_norm_eps"],
        )
        wide, width = self.has_own_head, raw["intermediate_size"]
        found: dict[str, tuple[int, ...]] = {"fc.weight": (h, 3 * h if wide else 2 * h)}
        found |= {"fc.bias": (h,)} if fc_bias else {}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"{self.at}self_attn.{name}_proj.weight"] = (rows, 2 * h if wide else h)
            found |= {f"{self.at}self_attn.{name}_proj.bias": (rows,)} if qkv_bias else {}
        found[f"{self.at}self_attn.o_proj.weight"] = (h, q)
        found |= {f"{self.at}self_attn.o_proj.bias": (h,)} if o_bias else {}
        found |= {f"{self.at}mlp.{name}_proj.weight": (width, h) for name in ("gate", "up")}
        found |= {f"{self.at}mlp.down_proj.weight": (h, width), f"{self.at}post_attention_layernorm.weight": (h,)}
        if wide:
            found |= {f"{self.at}{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm")}
            found |= {"norm.weight": (h,), "lm_head.weight": (self.draft_vocab, h)}
        return found

    def put(self, name: str, tensor: Tensor) -> bool:
        """Into the parameter of that name; whether there is one. A wrong shape raises."""
        name = name.replace("layers.0.", self.at)
        if name not in self.weights:
            return False
        if tensor.shape != self.weights[name].shape:
            raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(self.weights[name].shape)}")
        self.weights[name] = tensor
        return True


class Eagle1(Drafter):
    """`fc` and `layers.0`; embedding and head are the policy's."""

    at = "layer."


class SglangEagle1(Eagle1):
    architectures = ("Qwen2ForCausalLMEagle", "LlamaForCausalLMEagle")

    def sizes(self) -> tuple[int, bool, bool, bool]:
        usual = self.raw["hidden_size"] // self.raw["num_attention_heads"]
        if self.architecture == "Qwen2ForCausalLMEagle":
            return usual, True, False, True
        bias = self.raw.get("attention_bias", False) or self.raw.get("bias", False)
        return self.raw.get("head_dim", usual), bias, bias, True

    def load(self, name: str, tensor: Tensor) -> None:
        self.put(name, tensor)  # unknown: a warning in the log


class VllmEagle1(Eagle1):
    architectures = ("LlamaForCausalLM",)  # it puts Eagle before it

    def sizes(self) -> tuple[int, bool, bool, bool]:
        raw = self.raw
        bias = raw.get("attention_bias", False) or raw.get("bias", False)
        usual = raw["hidden_size"] // raw["num_attention_heads"]
        return raw.get("head_dim") or usual, raw.get("qkv_bias", bias), bias, False

    def load(self, name: str, tensor: Tensor) -> None:
        if not self.put(name, tensor):
            raise ValueError(f"There is no module or parameter named {name}")


class Eagle3(Drafter):
    """`fc` over three layers' outputs, `midlayer`, `norm`, own `lm_head` over Vd tokens, `d2t` offsets."""

    architectures = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
    at, has_own_head = "midlayer.", True

    def sizes(self) -> tuple[int, bool, bool, bool]:
        raw = self.raw
        usual, bias = raw["hidden_size"] // raw["num_attention_heads"], raw["attention_bias"]
        return raw.get("head_dim") or usual, bias, bias, raw.get("bias", False)

    def default_layers(self, num_layers: int) -> list[int]:
        if num_layers <= 5:
            raise ValueError("Not enough hidden layers for default EAGLE3 capture")
        return [1, num_layers // 2 - 1, num_layers - 4]


class SglangEagle3(Eagle3):
    architectures = ("LlamaForCausalLMEagle3",)

    def load(self, name: str, tensor: Tensor) -> None:
        if "d2t" in name:
            self.offsets = tensor
        elif "t2d" not in name:
            self.put(name, tensor)  # unknown: skipped without a word

    def aux_layers(self, num_layers: int) -> list[int]:
        given = self.raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        inputs = [i + 1 for i in given or self.default_layers(num_layers)]
        return [i - 1 for i in inputs]  # it collects what enters layer i


class VllmEagle3(Eagle3):
    def load(self, name: str, tensor: Tensor) -> None:
        if "t2d" in name:
            return
        if "d2t" in name:
            if self.draft_vocab == self.raw["vocab_size"]:
                raise ValueError("d2t of a drafter with the whole vocabulary")
            self.offsets = tensor
        elif not self.put(name, tensor):
            raise KeyError(name)

    def aux_layers(self, num_layers: int) -> list[int]:
        key, config = "eagle_aux_hidden_state_layer_ids", self.raw.get("eagle_config") or {}
        given = self.raw.get(key) or config.get(key)
        after = sorted(set(given)) if given else [i + 1 for i in self.default_layers(num_layers)]
        return [k - 1 for k in after]  # it collects the stream after k layers


class TrtllmEagle3(Eagle3):
    """Layer ids are the caller's argument there: the export has them in `speculative.json`."""

    architectures = ("LlamaForCausalLMEagle3",)  # without Eagle3, and with EAGLE3 before it

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.arguments: dict[str, Any] = json.loads((directory / "speculative.json").read_text())

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "d2t":
            if self.draft_vocab != self.raw["vocab_size"]:
                self.offsets = tensor.to(torch.int32)
        elif not self.put(name, tensor):
            assert name != "lm_head.weight"  # modules it does not have are not looked at

    def aux_layers(self, num_layers: int) -> list[int]:
        given = self.arguments.get("eagle3_layers_to_capture")
        return sorted(given) if given else self.default_layers(num_layers)


def chain(
    engine: Drafter, tokens: Tensor, features: Tensor, embed: Tensor, head: Tensor, base: int, steps: int
) -> Tensor:
    """Logits [steps, V] of a draft from place `base` that is fed `tokens`.

    As in the engines, the pair of token i and the policy's features [T, ..] of place i - 1 is at position i - 1.
    """
    e, out, is_wide = dict(engine.weights), [], engine.has_own_head
    e |= {} if engine.offsets is None else {"d2t": engine.offsets}
    policy = [("model.embed_tokens.weight", embed), ("lm_head.weight", head)]
    form = SimpleNamespace(
        kind="eagle3" if is_wide else "eagle",
        layer=engine.layer,
        policy=SimpleNamespace(vocab_size=len(head)),
        draft_vocab_size=engine.draft_vocab,
        norm_before_residual=False,
    )
    hidden = features[:base] @ e["fc.weight"].T + e.get("fc.bias", 0.0) if is_wide else features[:base]
    for step in range(steps):
        logits, fed = expected(form, policy, list(e.items()), tokens[1 : base + step + 1].tolist(), hidden, 0)  # type: ignore[arg-type]
        out.append(logits[-1])
        hidden = torch.cat([hidden, fed[-1:]])
    return torch.stack(out)


EAGLE = {"sglang": SglangEagle1, "vllm": VllmEagle1}
EAGLE3 = {"sglang": SglangEagle3, "trtllm": TrtllmEagle3, "vllm": VllmEagle3}

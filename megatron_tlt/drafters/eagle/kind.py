"""`EagleKind`: EAGLE-1 in TLT's form. vLLM and SGLang run it for Llama and Qwen2 policies, TensorRT-LLM does not.

Engines leave a tensor that they do not find at its random start, or skip one that they do not know, without a message:
so names and config keys follow each engine's own loader; `docs/guides/export_drafter.md` says where each rule was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import (
    ENGINES,
    ConfigT,
    DrafterKind,
    ExportFiles,
    Format,
    LossParts,
    cast_tensors,
)
from megatron_tlt.drafters.decoder import DrafterDecoder
from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.eagle.loss import draft_loss
from megatron_tlt.drafters.eagle.model import EagleModel, PairModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.eagle.torch_decoder import TorchEagle
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.errors import BackendError
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig


class PairKind(DrafterKind[ConfigT, PairModel]):
    """The common part of EAGLE and EAGLE-3: one layer over pairs, which drafts position by position."""

    def build_decoder(self, policy: Decoder, config: ConfigT, threads: int = 1) -> DrafterDecoder:
        """In the form of the policy's decoder."""
        if isinstance(policy, TorchDecoder):
            return TorchEagle(policy, self.build_model(config))
        from megatron_tlt.models.decoders.native.decoder import NativeDecoder

        if not isinstance(policy, NativeDecoder):
            raise BackendError(f"there is no eagle drafter for a {policy.kind} decoder")
        from megatron_tlt.drafters.eagle.native_decoder import NativeEagle

        return NativeEagle(policy, config, threads)

    def loss(
        self, model: PairModel, given: LossInputs, forward: AbstractContextManager[object]
    ) -> tuple[Tensor, LossParts]:
        """Drafts from every base."""
        layout = PairLayout(given.batch)
        with forward:
            outputs = model.unroll(given.embed, given.batch, layout, given.steps)
        return draft_loss(model, outputs, layout, given)


class EagleKind(PairKind[EagleConfig]):
    """EAGLE-1: drafts from a token and a hidden state."""

    facts = DRAFTERS["eagle"]
    title, paper = "EAGLE", "EAGLE-1"
    loss_parts = ("hidden", "ce", "accept")

    def fresh(self, section: SpeculationSection, policy: ModelConfig) -> EagleConfig:
        return EagleConfig.of(policy, section.draft_tokens(policy.vocab_size))

    def build_model(self, config: EagleConfig) -> PairModel:
        return EagleModel(config)

    def entries(self, config: EagleConfig) -> dict[str, Any]:
        return {"draft_vocab_size": config.draft_vocab_size} if config.reduced else {}

    def read_entries(self, about: Mapping[str, Any], policy: ModelConfig) -> EagleConfig:
        return EagleConfig.of(policy, about.get("draft_vocab_size"))

    def serving_notes(self, engine: Format) -> str:
        shared = "Embedding and LM head are the policy's and are not here"
        if engine == "sglang":
            return f"{shared}; `fc.bias` is zero because SGLang gives fc a bias. "
        method = "`method` must be given, as vLLM otherwise guesses it from the directory's name."
        return f"{shared}: run with pipeline parallel size 1. {method} "

    def engine_problem(self, config: EagleConfig, engine: Format) -> str | None:
        policy = config.policy
        if engine == "trtllm":
            return "TensorRT-LLM's PyTorch backend runs EAGLE-3 drafters only, and this one is of kind eagle (EAGLE-1)"
        if policy.qk_norm:
            normed = f"as that of a {policy.family} policy does"
            return f"{ENGINES[engine]} has no EAGLE-1 drafter whose attention normalises queries and keys, {normed}"
        if engine == "sglang" and policy.qkv_bias and policy.head_dim * policy.num_heads != policy.hidden_size:
            wanted = f"hidden_size / heads = {policy.hidden_size / policy.num_heads:g}"
            return f"SGLang's Qwen2 computes head_dim as {wanted}, and this policy's is {policy.head_dim}"
        return None

    def engine_files(
        self, config: EagleConfig, weights: Mapping[str, Tensor], engine: Format, dtype: torch.dtype
    ) -> ExportFiles:
        policy, named = config.policy, self.engine_tensors(config, weights)
        self.require_engine(config, engine)
        if engine == "sglang":  # its fc always has a bias, and one that the file lacks stays random
            named["fc.bias"] = torch.zeros(policy.hidden_size)
        about = _config(policy, engine, str(dtype).removeprefix("torch."))
        return ExportFiles({"model.safetensors": cast_tensors(named, dtype)}, {"config.json": about})

    def rollout_problem(self, config: EagleConfig, engine: Format) -> str | None:
        return None if engine == "vllm" else self.engine_problem(config, engine)

    def vllm_files(self, config: EagleConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> ExportFiles:
        """With normalised queries and keys for the plugin's class (`backends/vllm/plugin/eagle_qwen3.py`)."""
        if not config.layer.qk_norm:
            return super().vllm_files(config, weights, dtype)
        about = config.policy.dense_sibling.to_hf(str(dtype).removeprefix("torch.")) | {
            "architectures": ["Qwen3ForCausalLM"],  # vLLM puts Eagle before it
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,  # a drafter without tables shares the policy's
        }
        tensors = cast_tensors(self.engine_tensors(config, weights), dtype)
        return ExportFiles({"model.safetensors": tensors}, {"config.json": about})


KIND = EagleKind()


def _config(policy: ModelConfig, engine: Format, dtype: str) -> dict[str, Any]:
    """config.json; `to_hf` has both old and new rope keys."""
    out = (
        policy.dense_sibling.to_hf(dtype)  # drafters are dense
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,  # both engines put the policy's tables in; a tied head would go with them
            "bias": False,
            "attention_bias": False,
        }
    )
    if engine == "sglang":
        return out | {"architectures": ["Qwen2ForCausalLMEagle" if policy.qkv_bias else "LlamaForCausalLMEagle"]}
    # vLLM puts "Eagle" before it and has EagleLlamaForCausalLM; `qkv_bias` gives q, k and v a bias and o_proj none.
    return out | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": policy.qkv_bias}

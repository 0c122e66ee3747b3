"""`Eagle3Kind`: EAGLE-3, which vLLM, SGLang and TensorRT-LLM run for policies of every family.

A layer id i means the OUTPUT of policy layer i, from 0. SGLang's ids mean the same (it adds 1 itself), vLLM's count the
layers before (i + 1), and TensorRT-LLM takes ours as an argument and not from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter_kinds import DRAFTERS, vllm_layers_problem
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import ENGINES, ExportFiles, Format, cast_tensors
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.eagle.kind import PairKind
from megatron_tlt.drafters.eagle.model import PairModel
from megatron_tlt.drafters.eagle3.model import Eagle3Model
from megatron_tlt.drafters.eagle3.public import FORM
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig


class Eagle3Kind(PairKind[Eagle3Config]):
    facts = DRAFTERS["eagle3"]
    title = paper = "EAGLE-3"
    loss_parts = ("ce", "accept")
    public = FORM

    def fresh(self, section: SpeculationSection, policy: ModelConfig) -> Eagle3Config:
        return Eagle3Config.of(policy, section.layers, section.draft_tokens(policy.vocab_size))

    def build_model(self, config: Eagle3Config) -> PairModel:
        return Eagle3Model(config)

    def entries(self, config: Eagle3Config) -> dict[str, Any]:
        return {
            "eagle3_layers": list(config.aux_layers),
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "layer": config.layer.to_hf() | {"torch_dtype": None},
        }

    def read_entries(self, about: Mapping[str, Any], policy: ModelConfig) -> Eagle3Config:
        layers, size, own = about.get("eagle3_layers"), about.get("draft_vocab_size"), about.get("layer")
        if not isinstance(layers, list) or not all(isinstance(i, int) for i in layers):
            raise CheckpointError(f"eagle3_layers = {layers!r} must be a list of three ids")
        if not isinstance(size, int):
            raise CheckpointError(f"draft_vocab_size = {size!r} must be an integer")
        layer = None if own is None else ModelConfig.from_hf(own)
        return Eagle3Config.of(policy, tuple(layers), size, layer, bool(about.get("norm_before_residual")))

    def engine_problem(self, config: Eagle3Config, engine: Format) -> str | None:
        if engine == "vllm":
            return vllm_layers_problem(config.policy.family)
        if config.norm_before_residual:
            return f"{ENGINES[engine]} has no EAGLE-3 drafter with norm_before_residual"
        return None

    def engine_files(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], engine: Format, dtype: torch.dtype
    ) -> ExportFiles:
        self.require_engine(config, engine)
        json = {"config.json": _config(config, engine, str(dtype).removeprefix("torch."))}
        if engine == "trtllm":
            json["speculative.json"] = {"eagle3_layers_to_capture": list(config.aux_layers)}
        return ExportFiles({"model.safetensors": cast_tensors(weights, dtype)}, json)

    def card_rows(self, config: Eagle3Config) -> str:
        layers, vocab = ", ".join(map(str, config.aux_layers)), config.policy.vocab_size
        rows = f"| reads the outputs of policy layers | {layers} (from 0) |\n"
        return rows + f"| drafts | {config.draft_vocab_size} of the policy's {vocab} tokens |\n"


KIND = Eagle3Kind()


def _config(config: Eagle3Config, engine: Format, dtype: str) -> dict[str, Any]:
    """config.json: a Llama of one layer, whatever the policy is."""
    normed = {"norm_before_residual": True} if config.norm_before_residual else {}
    out = (
        config.served_layer(dtype)
        | normed
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,  # the head is the drafter's own
            "bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "draft_vocab_size": config.draft_vocab_size,
        }
    )
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if engine == "vllm":
        out["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config.aux_layers]
    elif engine == "sglang":
        eagle["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    return out | {"eagle_config": eagle}

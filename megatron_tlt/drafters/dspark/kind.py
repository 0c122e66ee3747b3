"""`DSparkKind`: block drafters, which vLLM and SGLang run (Qwen3's form of layers only), TensorRT-LLM not.

A layer id i means the OUTPUT of policy layer i, from 0, here as in DeepSpec's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.block_drafters import CONV_GROUP, NUM_CANDIDATES, block_shape
from megatron_tlt.config.drafter_kinds import DRAFTERS, vllm_layers_problem
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import (
    ENGINES,
    DrafterKind,
    ExportFiles,
    Format,
    LossParts,
    cast_tensors,
)
from megatron_tlt.drafters.decoder import DrafterDecoder
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.dspark.decoder import TorchBlock
from megatron_tlt.drafters.dspark.loss import block_loss, draw_anchors
from megatron_tlt.drafters.dspark.model import BlockModel
from megatron_tlt.drafters.dspark.public import FORM
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.fields import known_fields

# Of a token outside the drafter's vocabulary: its square is far above any logit, and finite in fp16.
_NEVER = 100.0


class DSparkKind(DrafterKind[BlockConfig, BlockModel]):
    """A block of tokens in one forward."""

    facts = DRAFTERS["dspark"]
    title, paper = "DSpark", "DSpark (2607.05147)"
    loss_parts = ("ce", "accept")
    public = FORM

    def fresh(self, section: SpeculationSection, policy: ModelConfig) -> BlockConfig:
        sizes = section.draft_tokens(policy.vocab_size), section.block_layers, section.block_size
        return BlockConfig.fresh(policy, section.layers, *sizes)

    def entries(self, config: BlockConfig) -> dict[str, Any]:
        layer = config.layer.to_hf() | {"torch_dtype": None} | _layer_entries(config)
        return {**_sizes(config), "draft_vocab_size": config.draft_vocab_size, "layer": layer}

    def read_entries(self, about: Mapping[str, Any], policy: ModelConfig) -> BlockConfig:
        try:
            shape, size = block_shape(about), int(about["draft_vocab_size"])
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"an entry of a drafter of kind dspark is missing or wrong: {e}") from e
        layer = ModelConfig.from_hf(known_fields(about["layer"]) | {"sliding_window": None})
        return BlockConfig.of(policy, shape, size, layer)

    def build_decoder(self, policy: Decoder, config: BlockConfig, threads: int = 1) -> DrafterDecoder:
        """In PyTorch beside either decoder."""
        return TorchBlock(policy, BlockModel(config))

    def build_model(self, config: BlockConfig) -> BlockModel:
        return BlockModel(config)

    def loss(
        self, model: BlockModel, given: LossInputs, forward: AbstractContextManager[object]
    ) -> tuple[Tensor, LossParts]:
        """Blocks from random anchors."""
        layout = PairLayout(given.batch)
        chosen = draw_anchors(model, layout)
        with forward:
            slots = model.fill(given.embed, given.batch, layout, chosen)
        return block_loss(model, slots, chosen, layout, given)

    def engine_problem(self, config: BlockConfig, engine: Format) -> str | None:
        if engine == "trtllm":
            return "TensorRT-LLM has no drafter of kind dspark for dense policies"
        if engine == "vllm" and (problem := vllm_layers_problem(config.policy.family)):
            return problem
        if not config.layer.qk_norm or config.layer.qkv_bias:
            return f"{ENGINES[engine]} runs block drafters with layers of Qwen3's form only"
        if config.reduced and not config.markov_rank:
            return f"{ENGINES[engine]} would draft tokens outside the vocabulary of {config.draft_vocab_size}"
        if config.sample_from_anchor and not config.markov_rank:
            return f"{ENGINES[engine]} has no block drafter without a Markov head that drafts from the anchor"
        return None

    def engine_files(
        self, config: BlockConfig, weights: Mapping[str, Tensor], engine: Format, dtype: torch.dtype
    ) -> ExportFiles:
        """DeepSpec's form; z-lab's of a drafter without Markov head."""
        self.require_engine(config, engine)
        named = cast_tensors(self.engine_tensors(config, weights), dtype)
        about = _config(config, str(dtype).removeprefix("torch."))
        return ExportFiles({"model.safetensors": named}, {"config.json": about})

    def engine_tensors(self, config: BlockConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing in training keeps tokens outside a reduced vocabulary improbable:
        one more column of the Markov head takes `_NEVER` squared off their logits.
        """
        named = super().engine_tensors(config, weights)
        if config.reduced:
            first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
            ids = weights["d2t"] + torch.arange(config.draft_vocab_size, device=weights["d2t"].device)
            w1, w2 = named[first], named[second]
            biases = w2.new_zeros(len(w1), w2.shape[1] + 1)
            biases[:, -1] = -_NEVER
            named[second] = biases.index_copy_(0, ids, torch.cat([w2, w2.new_zeros(len(w2), 1)], 1))
            named[first] = torch.cat([w1, w1.new_full((len(w1), 1), _NEVER)], 1)
        return named

    def was_served_by(self, config: BlockConfig) -> tuple[Format, ...]:
        """Of DFlash; on CPUs vLLM has neither DSpark nor DFlash 2."""
        return () if config.markov_rank or config.selector_rank or config.windows else ("vllm",)

    def serving_notes(self, engine: Format) -> str:
        return "Embedding and LM head are the policy's and are not here. "

    def serving_options(self, config: BlockConfig) -> dict[str, Any]:
        method, length = "dspark" if config.markov_rank else "dflash", config.num_drafted
        return {"method": method, "length": length, "flags": f"--speculative-num-draft-tokens {config.block_size}"}

    def card_rows(self, config: BlockConfig) -> str:
        layers = ", ".join(map(str, config.aux_layers))
        rows = f"| reads the outputs of policy layers | {layers} (from 0) |\n"
        rows += f"| drafts | {config.num_drafted} tokens at once, {config.block_layers} layers |\n"
        return rows + f"| vocabulary | {config.draft_vocab_size} of the policy's {config.policy.vocab_size} tokens |\n"

    def rollout_problem(self, config: BlockConfig, engine: Format) -> str | None:
        if engine == "vllm" and (config.selector_rank or config.windows):
            return "vLLM's first model runner has no DFlash 2 and no sliding windows"
        return self.engine_problem(config, engine)

    def vllm_method(self, config: BlockConfig) -> str:
        return "dflash"

    def vllm_files(self, config: BlockConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> ExportFiles:
        """For the plugin's class (`backends/vllm/plugin/block_drafter.py`)."""
        files = self.engine_files(config, weights, "vllm", dtype)
        read = {"target_layer_ids": list(config.aux_layers), "mask_token_id": config.mask_token_id}
        more = {"architectures": ["DFlashBlockForCausalLM"], "dflash_config": read}
        about = {"markov_rank": 0, "sample_from_anchor": False} | files.json["config.json"] | more
        return ExportFiles(files.tensors, {"config.json": about})

    def cached_layers(self, config: BlockConfig) -> int:
        return config.block_layers

    def draft_length(self, config: BlockConfig) -> int:
        return config.num_drafted


KIND = DSparkKind()


def _sizes(config: BlockConfig) -> dict[str, Any]:
    """Entries that our files and DeepSpec's have alike."""
    names = ["block_size", "markov_rank", "mask_token_id", "sample_from_anchor"]
    names += ["selector_rank"] if config.selector_rank else []
    return {"target_layer_ids": list(config.aux_layers), **{name: getattr(config, name) for name in names}}


def _layer_entries(config: BlockConfig) -> dict[str, Any]:
    """Entries on the number of layers and their windows, as public files have them."""
    kinds = ["sliding_attention" if window else "full_attention" for window in config.layer_windows]
    out: dict[str, Any] = {"num_hidden_layers": config.block_layers, "layer_types": kinds}
    if config.windows:
        out |= {"sliding_window": max(config.windows), "use_sliding_window": True, "is_causal": False}
    return out


def _config(config: BlockConfig, dtype: str) -> dict[str, Any]:
    """config.json."""
    policy, rank = config.policy, {"markov_rank": config.markov_rank + config.reduced}
    out = (
        config.served_layer(dtype)
        | _layer_entries(config)
        | {
            "vocab_size": policy.vocab_size,
            "num_target_layers": policy.num_layers,
            "tie_word_embeddings": False,  # both tables are the policy's
        }
    )
    if not config.markov_rank:
        nested = {"target_layer_ids": list(config.aux_layers), "mask_token_id": config.mask_token_id}
        block = {"block_size": config.block_size}
        if not config.selector_rank:
            return out | {"architectures": ["DFlashDraftModel"], **block, "dflash_config": nested}
        nested |= {**block, "selector_rank": config.selector_rank, "selector_top_k": NUM_CANDIDATES}
        nested |= {"conv_kernel_size": 2, "conv_group_size": CONV_GROUP}
        return out | {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}
    return (
        out
        | _sizes(config)
        | rank
        | {
            "architectures": ["Qwen3DSparkModel"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "dspark_bonus_anchor": not config.sample_from_anchor,
        }
    )

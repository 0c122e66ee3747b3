"""Which model is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_tlt.config.base import OnDisk, Section


class ArchitectureConfig(Section):
    """The shape of a model, for checks and estimates without its files."""

    family: Literal["qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mixtral"]
    """Decoder family: qwen2 (also Qwen2.5), qwen3, llama (Llama 3), or with experts qwen2_moe, qwen3_moe, mixtral."""
    vocab_size: PositiveInt
    """Rows of the embedding."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Decoder layers."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key/value heads (GQA)."""
    head_dim: PositiveInt
    """Width of one head."""
    intermediate_size: PositiveInt
    """Width of the (dense) MLP."""
    tie_word_embeddings: bool = False
    """Whether the LM head is the embedding."""
    num_experts: NonNegativeInt = 0
    """Experts of a layer; 0: a dense model."""
    num_experts_per_tok: NonNegativeInt = 0
    """Experts that a token takes."""
    moe_intermediate_size: NonNegativeInt = 0
    """Width of an expert."""
    shared_expert_intermediate_size: NonNegativeInt = 0
    """Width of the expert that every token takes (Qwen2-MoE); 0: none."""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """Layers of a mixture of experts that have a dense MLP instead."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        dense = range(self.num_layers) if not self.num_experts else self.dense_layers
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)


class ModelSection(Section):
    """The model to train."""

    path: Annotated[str, OnDisk("model")]
    """Hugging Face directory (config.json, *.safetensors, tokenizer files) the policy starts from, or a name on the
    Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION (branch, tag, commit). A path that exists is
    never read as a name."""
    tokenizer: Annotated[str | None, OnDisk("companions")] = None
    """Directory of the tokenizer, or a name on the hub; default: `path`."""
    megatron_path: Annotated[str | None, OnDisk()] = None
    """Megatron distributed checkpoint (torch_dist, any layout) that the policy takes its starting weights from.
    `path` then gives only config.json and the tokenizer (to TensorRT-LLM also the weights that it starts with). The
    directory with latest_checkpointed_iteration.txt, or the one with the shards; what
    `tools/convert_hf_to_megatron.py` writes is good as `path`, too."""
    architecture: ArchitectureConfig | None = None
    """Expected shape, which `check` plans where it can read no config.json of `path`, neither on this machine nor on
    the hub; where it can, both must agree."""
    max_context: PositiveInt = Field(default=4096)
    """Longest prompt + response in tokens."""

    @property
    def tokenizer_path(self) -> str:
        """Directory or name of the tokenizer."""
        return self.tokenizer or self.path

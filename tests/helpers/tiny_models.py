"""Tiny random models of every family, ragged batches over shuffled KV blocks, and one plain pass over whole texts.

Legend: T packed rows, S sequences, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_tlt.models.decoders.base import Decoder, KVCache
from megatron_tlt.models.decoders.inputs import DecoderInput, DecoderOutput
from megatron_tlt.models.decoders.keys import request_key, row_keys
from megatron_tlt.models.hf.config import ModelConfig

_SHAPE: dict[str, Any] = {"vocab_size": 131, "num_hidden_layers": 3, "initializer_range": 0.08, "rms_norm_eps": 1e-6}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {  # tied, biased, 3 query heads to a kv head
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3": {  # head size unrelated to hidden / heads
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 40,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "llama": {  # untied, scaled rotary embedding
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}
_MOE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
}
_QWEN_MOE = _MOE | {"num_experts": 8, "moe_intermediate_size": 32, "tie_word_embeddings": True}
MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True},
    "qwen3_moe_mixed": _QWEN_MOE | {"head_dim": 32, "mlp_only_layers": [0]},  # not renormalised
    "qwen2_moe": _QWEN_MOE | {"shared_expert_intermediate_size": 48},
    "mixtral": _MOE | {"num_local_experts": 4},
}
_NAMES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_moe_mixed": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "mixtral": "Mixtral",
}


def hf_model(family: str, **changes: Any):
    """A random fp32 `transformers` model, eager attention: "qwen2", "qwen3", "llama" or one of `MOE_FAMILIES`, with
    other fields of its configuration if they are given.
    """
    import transformers

    torch.manual_seed(1 + list(_NAMES).index(family))
    name = _NAMES[family]
    fields = deepcopy({**_FAMILIES, **MOE_FAMILIES}[family]) | changes
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **fields})
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0: make them matter
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.2)
            elif "gate.weight" in name or "expert" in name:
                p.normal_(0, 0.15)  # experts that differ visibly
    return model


def model_config(model) -> ModelConfig:
    return ModelConfig.from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]})


def moe_config(family: str, vocab: int) -> ModelConfig:
    """A dense layer, then one of 7 experts, of which 3 are chosen and, in qwen2_moe, one is shared."""
    return ModelConfig(
        family,  # type: ignore[arg-type]
        *(vocab, 64, 2, 4, 2, 16, 88),
        tie_word_embeddings=True,
        qkv_bias=family == "qwen2_moe",
        qk_norm=family == "qwen3_moe",
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72 if family == "qwen2_moe" else 0,
        norm_topk_prob=family != "qwen2_moe",
        moe_layers=(1,),
    )


def named_weights(model) -> list[tuple[str, Tensor]]:
    return [(n, p.detach()) for n, p in model.named_parameters()]


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[tuple[str, Tensor]]:
    """Named tensors of sensible size; those of norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        out.append((name, (w + 1 if "norm" in name else w).to(dtype)))
    return out


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """Weights of any configuration, without transformers."""
    return random_tensors(config.parameter_shapes(), seed, dtype)


@dataclass
class Driver:
    """Runs sequences through a decoder, each with its own shuffled blocks. `step` takes any mix of chunks."""

    decoder: Decoder
    num_blocks: int = 64
    block_size: int = 16
    seed: int = 0
    kv: KVCache = field(init=False)
    done: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = self.decoder.new_kv_cache(self.num_blocks, self.block_size)
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(self.seed))
        self.free = order.tolist()

    def step(self, chunks: list[tuple[int, list[int]]], all_rows: bool = True) -> DecoderOutput:
        """chunks: (sequence id, its next tokens). Logits of every row, or of each chunk's last row; states of all."""
        firsts = [self.done.get(seq, 0) for seq, _ in chunks]
        for (seq, ids), first in zip(chunks, firsts, strict=True):
            table = self.tables.setdefault(seq, [])
            while len(table) * self.block_size < first + len(ids):
                table.append(self.free.pop())
            self.done[seq] = first + len(ids)
        rows, tables = [ids for _, ids in chunks], [self.tables[seq] for seq, _ in chunks]
        batch = rows_input(rows, firsts, tables, self.block_size, self.decoder.device)
        if not all_rows:
            batch.logit_rows = batch.query_start[1:] - 1
        batch.all_hidden = True
        return self.decoder.forward(batch, self.kv)


TINY = ModelConfig(
    "qwen3", 51, 32, 2, 2, 1, 16, 48, qk_norm=True, tie_word_embeddings=True, max_position_embeddings=256
)


def rows_input(
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int = 16,
    device: torch.device | str = "cpu",
) -> DecoderInput:
    """Sequence s feeds the tokens `rows[s]` at positions `firsts[s]`, ... of its block table; logits of every row."""
    tokens: list[int] = []
    positions, slots, starts, contexts = [], [], [0], []
    for ids, first, table in zip(rows, firsts, tables, strict=True):
        at = range(first, first + len(ids))
        positions += at
        slots += [table[p // block_size] * block_size + p % block_size for p in at]
        tokens += ids
        starts.append(len(tokens))
        contexts.append(first + len(ids))
    width = max(map(len, tables))
    padded = [list(t) + [0] * (width - len(t)) for t in tables]
    data = (tokens, positions, slots, starts, contexts, padded, list(range(len(tokens))))
    return DecoderInput.of([torch.tensor(x, dtype=torch.int32, device=device) for x in data])


def copy_of(kv: KVCache) -> KVCache:
    """The same cache in other memory."""
    return KVCache(kv.num_blocks, kv.block_size, kv.data.clone())


def read_hidden_states(
    decoder: Decoder, texts: Iterable[Sequence[int]], block_size: int, max_tokens: int
) -> Iterator[Tensor]:
    """`DecoderOutput.hidden` of each text, [L, ..] on the CPU, in the decoder's type.

    Texts share forwards of at most `max_tokens` rows; a longer one has a forward of its own.
    """
    group: list[Sequence[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > max_tokens:
            yield from _hidden_of_group(decoder, group, block_size)
            group = []
        group.append(text)
    if group:
        yield from _hidden_of_group(decoder, group, block_size)


def _hidden_of_group(decoder: Decoder, texts: Sequence[Sequence[int]], size: int) -> Iterator[Tensor]:
    counts = [len(t) for t in texts]
    blocks = [-(-n // size) for n in counts]
    tables = [range(sum(blocks[:i]), sum(blocks[: i + 1])) for i in range(len(blocks))]
    batch = rows_input(texts, [0] * len(texts), tables, size, decoder.device)
    one_row = batch.query_start[1:2] - 1  # of logits: the least that every decoder computes
    batch = replace(batch, logit_rows=one_row, all_hidden=True)
    hidden = decoder.forward(batch, decoder.new_kv_cache(sum(blocks), size)).hidden
    assert hidden is not None, "asked for"
    yield from hidden.cpu().split(counts)


def row_key(seed: int, prompt_id: int, sample_index: int, position: int) -> int:
    """The key of one output position (0-based)."""
    keys = np.array([request_key(seed, prompt_id, sample_index)], np.uint64)
    return int(row_keys(keys, np.array([position]))[0])

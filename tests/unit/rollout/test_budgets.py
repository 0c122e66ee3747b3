"""Budgets of a step on a GPU, with the real code on meta tensors: launches, bytes written, waits for the device.

Exact counts are of the nightly tests: they fail at many a change that costs a GPU nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.torch_decoder import TorchEagle
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.models.decoders.inputs import DecoderInput, HostLengths
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.rollout.graph_capture import EagerCapturer
from megatron_tlt.rollout.graph_pool import GraphPool, PoolSizes
from megatron_tlt.rollout.sampler import SamplingRows, _upload
from tests.helpers.budget import Cost, cost

META = torch.device("meta")
CONFIG = ModelConfig("qwen2", 4096, 256, 4, 14, 2, 64, 512, qkv_bias=True, max_position_embeddings=512)


class CountingTp:
    """Two ranks whose collectives only count."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.reduced: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, in_order: bool = False) -> None:
        self.reduced.append(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(self.size, *tensor.shape)


def decoder_of(config: ModelConfig, tp: CountingTp | None = None, aux_layers: tuple[int, ...] = ()) -> TorchDecoder:
    from megatron_tlt.models.decoders.torch.kernels.attention import attend
    from megatron_tlt.models.decoders.torch.kernels.layers import FUSED

    decoder = TorchDecoder(config, META, torch.bfloat16, tp, paged=attend, ops=FUSED, aux_layers=aux_layers)
    decoder.load_weights((name, torch.empty(shape, device=META)) for name, shape in config.parameter_shapes().items())
    return decoder


def batch_of(counts: list[int]) -> DecoderInput:
    rows = torch.empty(sum(counts), dtype=torch.int32, device=META)
    lengths, tables = rows.new_empty(len(counts)), rows.new_empty(len(counts), 16)
    starts = rows.new_empty(len(counts) + 1)
    batch = DecoderInput(rows, rows, rows, starts, lengths, tables, lengths)
    batch.lengths = HostLengths(counts, 200)
    return batch


def static(config: ModelConfig, sequences: int, rows_each: int, tp: CountingTp | None = None) -> Cost:
    decoder = decoder_of(config, tp)
    kv = decoder.new_kv_cache(64, 16)
    batch = batch_of([rows_each] * sequences)
    with cost() as counted:
        decoder.forward_static(batch, kv, rows_each)
    return counted


EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 96, "norm_topk_prob": True}
QWEN3 = {"qkv_bias": False, "qk_norm": True}


@pytest.mark.nightly
@pytest.mark.parametrize("rows_each", [1, 6], ids=["decode", "verify"])
@pytest.mark.parametrize(
    ("fields", "ranks", "a_layer", "beside"),
    [
        ({"family": "qwen2"}, 1, 9, 36),
        ({"family": "qwen3", **QWEN3}, 1, 9, 36),
        ({"family": "qwen2"}, 2, 9, 40),  # and two collectives a layer
        ({"family": "qwen3_moe", **QWEN3, **EXPERTS}, 1, 12, 36),  # two for the choice, four for the products
    ],
    ids=["qwen2", "qwen3", "two ranks", "experts"],
)
def test_a_captured_step_has_a_budget_of_launches(
    fields: dict, ranks: int, a_layer: int, beside: int, rows_each: int
) -> None:
    """Kernels a layer and beside the layers; ranks reduce twice a layer, in the model's type. Nothing is copied."""
    tp = CountingTp() if ranks > 1 else None
    layers = {n: {"moe_layers": tuple(range(n))} if "num_experts" in fields else {} for n in (4, 2)}
    deep, shallow = (static(replace(CONFIG, num_layers=n, **fields, **layers[n]), 8, rows_each, tp) for n in (4, 2))
    assert (deep.launches - shallow.launches) / 2 <= a_layer
    assert shallow.launches <= 2 * a_layer + beside - (19 if rows_each == 1 else 0)
    assert deep.copies == 0
    if tp is not None:
        assert len(tp.reduced) == 2 * (4 + 2)
        assert {t.dtype for t in tp.reduced} == {torch.bfloat16}


@pytest.mark.nightly
def test_a_layer_writes_each_of_its_activations_once() -> None:
    """The stream and its norm before attention and MLP, qkv, rotated queries, attention, and three more products."""
    rows, c = 8, CONFIG
    deep, shallow = (static(replace(c, num_layers=n), rows, 1) for n in (4, 2))
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    row = 4 * c.hidden_size + (q + 2 * kv) + 2 * q + 2 * c.hidden_size + 3 * c.intermediate_size
    assert (deep.written - shallow.written) / 2 == 2 * rows * row


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 1, 100, 70], [5, 1, 3]], ids=["decode", "mixed", "verify"])
def test_a_ragged_step_waits_for_nothing(counts: list[int]) -> None:
    """Lengths are the host's own: a value that is read, or an input made on the host, fails here."""
    decoder = decoder_of(CONFIG)
    kv = decoder.new_kv_cache(64, 16)
    with cost() as counted:
        decoder.forward(batch_of(counts), kv)
    assert counted.copies == 0
    assert counted.launches <= CONFIG.num_layers * 10 + 60
    tiles = [n.arguments for n in counted.kernels if n.name == "_attend"]
    if max(counts) >= 64:
        assert 64 in {a["M"] // a["FOLD"] for a in tiles}, "a prefill tile carries 64 query rows"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["eagle of qwen2", "eagle of qwen3", "eagle3"])
def test_a_position_of_a_draft_is_few_launches_and_waits_for_nothing(kind: str) -> None:
    is_qwen3 = kind == "eagle of qwen3"
    family = "qwen3" if is_qwen3 else "qwen2"
    layers = 5 if kind == "eagle3" else 1
    config = replace(CONFIG, num_layers=layers, family=family, qkv_bias=not is_qwen3, qk_norm=is_qwen3)
    shape = Eagle3Config.of(config, draft_vocab_size=2000) if kind == "eagle3" else EagleConfig.of(config)
    eagle = TorchEagle(decoder_of(config, aux_layers=shape.aux_layers), KINDS[shape.kind].build_model(shape))
    eagle.model.reserve_positions(512, META)
    kv, batch = eagle.new_kv_cache(8, 16), batch_of([1] * 8)
    hidden = torch.empty(8, config.hidden_size, dtype=torch.bfloat16, device=META)
    with cost() as counted, torch.inference_mode():
        logits, out = eagle.step(batch, hidden, batch.context_lens, kv)
    assert logits.shape == (8, shape.draft_vocab_size) and out.shape == hidden.shape
    assert counted.launches <= (53 if kind == "eagle3" else 23) and counted.copies == 0


@pytest.mark.nightly
def test_drawing_tokens_is_one_kernel_and_one_copy_that_writes_nothing_of_a_logit() -> None:
    from megatron_tlt.models.decoders.torch.kernels.sampling import draw

    rows, vocab = 256, 152064
    how = SamplingRows(
        np.zeros(rows, np.uint64), np.ones(rows, np.float32), np.full(rows, 5, np.int32),
        np.full(rows, 0.9), np.zeros(rows, np.float32), True,
    )  # fmt: skip
    with cost() as counted:
        draw(torch.empty(rows, vocab, device=META), *_upload(how, META), how.is_masked)
    assert [k.name for k in counted.kernels] == ["_draw"] and counted.operators == ["_to_copy"]
    assert counted.written - rows * vocab * 4 <= 40 * rows


@pytest.mark.parametrize("running", [8, 128, 256])
def test_drafts_of_all_running_requests_are_verified_by_a_graph(running: int) -> None:
    rollout = RolloutSection(max_running_requests=running)
    decoder = decoder_of(replace(CONFIG, num_layers=1))
    sizes = PoolSizes(running, 256, 16, rollout.verify_rows)
    pool = GraphPool(decoder, decoder.new_kv_cache(4, 16), sizes, capturer=EagerCapturer())
    for sequences, rows_each in ((running, 6), (running // 2, 12), (running // 8, 48), (1, 64)):
        assert pool.key(sequences, rows_each) is not None, (sequences, rows_each)
    assert pool.graphs.memory_bytes >= sizes.max_rows * (4096 + 256) * 2  # of bf16: nothing is kept in float32
    assert pool.graphs.memory_bytes < sizes.max_rows * (4096 + 256) * 2 + (1 << 20)

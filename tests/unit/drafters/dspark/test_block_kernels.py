"""The block drafter beside a decoder with Triton's kernels, in Triton's interpreter or on meta tensors: what it drafts,
what a draft costs, and the memory that the plan counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the helpers' rows are on CPUs", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

from megatron_tlt.config.load import build_config
from megatron_tlt.config.planning.engine import draft_bytes
from megatron_tlt.drafters.decoder import DraftingRows
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.dspark.decoder import BlockRowDrafter, TorchBlock
from megatron_tlt.drafters.dspark.model import BlockModel
from megatron_tlt.models.decoders.torch.decoder import TorchDecoder
from megatron_tlt.models.decoders.torch.kernels.attention import attend
from megatron_tlt.models.decoders.torch.kernels.layers import FUSED
from megatron_tlt.models.decoders.torch.layers import PLAIN
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.budget import Cost, cost
from tests.helpers.memory import MetaMemory
from tests.helpers.pairs import DFLASH2, block_config, check_block, rows_of
from tests.helpers.tiny_drafters import DEEP, random_drafter
from tests.helpers.tiny_models import random_weights

CONFIGS = {
    "dspark": block_config(DEEP["qwen3"]),
    "dflash": block_config(DEEP["qwen2"], layer=DEEP["qwen2"], sample_from_anchor=False, markov_rank=0),
    "dflash2": block_config(DEEP["qwen3"], **DFLASH2),
}
every = pytest.mark.parametrize("name", CONFIGS)


def loaded(config: BlockConfig, has_kernels: bool) -> TorchBlock:
    paged, ops = (attend, FUSED) if has_kernels else (None, PLAIN)
    policy = TorchDecoder(config.policy, aux_layers=config.aux_layers, paged=paged, ops=ops)
    policy.load_weights(random_weights(config.policy))
    made = TorchBlock(policy, BlockModel(config))
    made.load_weights(random_drafter(config).items())
    return made


def test_drafts_by_kernels_equal_plain_pytorch() -> None:
    """What is fed and what is drafted: a row that begins late, a short one, and one row of padding behind three."""
    config = CONFIGS["dflash2"]
    rows = rows_of(loaded(config, True), [20, 45, 3], temperature=[1.0, 0.7, 0.0], catch_up=30)
    drafted = rows.draft([9, 9, 2])
    assert drafted.counts.tolist() == [config.num_drafted] * 2 + [2]
    assert rows.rows.first[rows.rows.slot].tolist() == [1, 15, 1]
    weights = random_weights(config.policy), random_drafter(config)
    for row in range(3):
        check_block(drafted, rows, row, *weights)


@every
def test_blocks_by_kernels_are_those_of_gathered_keys(name: str) -> None:
    """Outputs of every slot. Of the second anchor the first positions are not seen; the last one is padding."""
    config = CONFIGS[name]
    rows = rows_of(loaded(config, False), [40, 75, 9])
    rows.draft(1)
    tables = torch.from_numpy(np.concatenate([rows.tables, rows.tables[:1]]))
    anchors, positions = torch.tensor([5, 6, 7, 0]), torch.tensor([39, 74, 8, 0])
    given = anchors, positions, torch.tensor([0, 40, 0, 0]), tables, rows.kv
    want, got = rows.drafter.fill(*given), loaded(config, True).fill(*given)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every
def test_a_draft_costs_what_contexts_have_not_what_tables_could(name: str) -> None:
    """Bytes written, launches and grids of kernels, from the inputs' upload on, by captured steps, whose tables are as
    wide as the longest context.
    """
    found: list[Any] = []
    for longest in (512, 16384):
        rows = rows_of(loaded(CONFIGS[name], True), [100, 40, 9], room=longest - 100)
        steps = dict(rows.drafts.steps())
        rows.drafter.use_graphs(lambda key, step, steps=steps: steps[key]())
        # Kernels are noted and not run: this one's tokens would be any numbers.
        rows.drafter.ops = rows.drafter.ops._replace(best_candidates=PLAIN.best_candidates)
        with cost("cpu") as counted, torch.inference_mode():
            rows.drafts._run(np.arange(3), np.full(3, 4))
        launched = [(k.name, k.grid, k.arguments.get("SPLITS")) for k in counted.kernels]
        found.append((counted.written, counted.launches, launched))
    assert found[0] == found[1]
    assert [name for name, *_ in found[0][2]].count("_attend") == 2


def on_meta(config: BlockConfig, most: int, monkeypatch: pytest.MonkeyPatch) -> BlockRowDrafter:
    rope = "megatron_tlt.drafters.model.rope_table"
    monkeypatch.setattr(rope, lambda c, count, device=None: torch.empty(count, c.head_dim, device="meta"))
    policy = TorchDecoder(config.policy, "meta", torch.bfloat16, aux_layers=config.aux_layers, paged=attend, ops=FUSED)
    with torch.device("meta"):
        drafter = TorchBlock(policy, BlockModel(config))
    tables, column = np.zeros((most, 32), np.int32), np.zeros(most, np.int32)
    more = np.zeros(most, np.uint64), np.zeros(most, np.float32), column, column
    rows = DraftingRows(column, column, column, tables, tables, *more)
    pages = torch.empty(16, policy.state_size, dtype=torch.bfloat16, device="meta")
    return drafter.row_drafter(drafter.new_kv_cache(8, 16), rows, pages)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "a_layer"), [("dspark", 9), ("dflash", 9), ("dflash2", 9 + 40)])
def test_a_draft_is_few_launches_a_layer(name: str, a_layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DFlash 2 with four convolutions in plain PyTorch."""
    counted: list[Cost] = []
    for layers in (2, 4):
        windows = CONFIGS[name].windows * (layers // 2)
        step = on_meta(replace(CONFIGS[name], block_layers=layers, windows=windows), 8, monkeypatch).steps()[0][1]
        with cost() as found, torch.inference_mode():
            step()
        counted.append(found)
    assert (counted[1].launches - counted[0].launches) / 2 <= a_layer
    assert counted[1].copies == 0


QWEN_7B = ModelConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, qkv_bias=True, max_position_embeddings=32768)


@pytest.mark.parametrize(
    ("requests", "tokens"), [(1, 152064), (64, 152064), (256, 152064), (1024, 152064), (256, 32000)]
)
def test_a_draft_has_the_memory_that_the_plan_counts(
    requests: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of its steps, whatever the number of requests: all logits of 1024 drafts would be 7.5 GB."""
    wanted = ["rollout.dtype=bf16", "rollout.speculation.drafter=dspark", f"rollout.max_running_requests={requests}"]
    wanted.append(f"rollout.speculation.draft_vocab_size={tokens}")
    planned = draft_bytes(build_config({"model": {"path": "m"}}, wanted), QWEN_7B)
    config = BlockConfig.fresh(QWEN_7B, draft_vocab_size=tokens)
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **named: None)
    with MetaMemory() as memory, torch.inference_mode():
        steps = on_meta(config, requests, monkeypatch).steps()
        memory.reset_peak()
        before = memory.live
        for _, step in steps:
            step()
        taken = memory.peak - before
    assert 0.75 * planned <= taken <= 1.01 * planned, (taken, planned)

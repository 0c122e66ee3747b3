"""The block drafter in rollouts and in training: what a few lines of plain PyTorch compute, block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.decoder import BUCKETS, POSITIONS, DraftingRows
from megatron_tlt.drafters.dspark.config import BlockConfig, spread_layers
from megatron_tlt.drafters.dspark.decoder import TorchBlock
from megatron_tlt.drafters.dspark.kind import DSparkKind
from megatron_tlt.drafters.dspark.model import BlockModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.training.batching import collate
from megatron_tlt.errors import BackendError, ConfigError
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.keyed_noise import best_candidates
from megatron_tlt.models.decoders.torch import attention
from tests.helpers.pairs import (
    DFLASH2,
    block_config,
    check_block,
    expected_logits,
    expected_slots,
    noted_waits,
    of_row,
    rows_of,
)
from tests.helpers.tiny_drafters import DEEP, lookup_tables, random_drafter, random_sequence, spread
from tests.helpers.tiny_models import random_weights

TIED = replace(DEEP["qwen3"], tie_word_embeddings=True)
PLAIN = replace(DEEP["llama"], num_kv_heads=2, rms_norm_eps=1e-3)
CONFIGS = {
    "dspark": block_config(TIED),
    "own head": block_config(DEEP["llama"], block_size=4, layers=1),
    "dflash": block_config(DEEP["qwen2"], sample_from_anchor=False, markov_rank=0),
    "bonus anchor": block_config(TIED, sample_from_anchor=False),
    "reduced": block_config(DEEP["qwen3"], 40, aux_layers=(0, 1, 2, 4, 6)),
    "other layers": block_config(DEEP["qwen2"], 60, PLAIN, markov_rank=0),
    "dflash2": block_config(TIED, **DFLASH2),
}
both = pytest.mark.parametrize("kernels", ["native", "torch"])
every = pytest.mark.parametrize("name", CONFIGS)


def loaded(name: str, kernels: str = "torch") -> TorchBlock:
    config = CONFIGS[name]
    policy = build_decoder(config.policy, kernels=kernels, aux_layers=config.aux_layers)
    policy.load_weights(random_weights(config.policy))
    made = DSparkKind().build_decoder(policy, config)
    made.load_weights(random_drafter(config).items())
    return made


@both
@every
def test_drafts_equal_plain_pytorch(kernels: str, name: str) -> None:
    """Prompts fed before, in pieces or not at all; rows without a draft; more wanted than a block has; greedy rows."""
    rows = rows_of(loaded(name, kernels), [40, 115, 3, 2, 17], temperature=[1.0, 0.7, 0.0, 1.0, 0.0])
    most = rows.drafter.config.num_drafted
    rows.feed(0, 1, 20)
    rows.feed(1, 1, 100)
    rows.feed(1, 100, 110)
    rates = np.linspace(0.95, 0.6, POSITIONS * BUCKETS, dtype=np.float32).reshape(POSITIONS, BUCKETS)
    drafted = rows.draft([9, 2, 3, 0, 4], rates)
    assert drafted.counts.tolist() == [most, 2, 3, 0, min(4, most)]
    weights = random_weights(rows.drafter.config.policy), random_drafter(CONFIGS[name])
    for row in range(5):
        check_block(drafted, rows, row, *weights, rates)
    assert of_row(rows.draft(2), 0).tokens.tolist() == of_row(drafted, 0).tokens[:2].tolist(), "nothing was left behind"


@pytest.mark.parametrize(("name", "kernels"), [("reduced", "native"), ("reduced", "torch"), ("own head", "native")])
def test_a_weight_sync_of_the_policy_shows_at_once(name: str, kernels: str) -> None:
    """It replaces the head whose rows, or whose unpacked copy, the drafter holds."""
    drafter = loaded(name, kernels)
    rows_of(drafter, [40, 18]).draft(6)
    synced = random_weights(CONFIGS[name].policy, seed=9)
    drafter.policy.load_weights(synced)
    rows = rows_of(drafter, [40, 18])
    check_block(rows.draft(6), rows, 1, synced, random_drafter(CONFIGS[name]))


def test_only_the_last_missing_features_are_caught_up_with() -> None:
    """Hidden states before them are not read, be they NaN."""
    rows = rows_of(loaded("dspark"), [40, 60, 9], catch_up=8)
    rows.pages[rows.slots(0, np.arange(30))] = float("nan")
    drafted = rows.draft(4)
    assert rows.rows.first[rows.rows.slot].tolist() == [32, 52, 1]
    check_block(drafted, rows, 0, random_weights(TIED), random_drafter(CONFIGS["dspark"]))


def test_a_draft_waits_for_the_device_once_and_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its length; the step is one that was captured at the start, and running it again changes nothing."""
    drafter, ran = loaded("dspark"), list[object]()
    want = rows_of(drafter, [40, 18, 9]).draft([5, 3, 6])
    drafter.use_graphs(lambda key, step: (ran.append(key), step(), step()))
    rows = rows_of(drafter, [40, 18, 9])
    waits = noted_waits(monkeypatch)
    got = rows.draft([5, 3, 6])
    assert waits == ["cpu"] and ran == [("drafter", 3)]
    assert ran[0] in [key for key, _ in rows.drafts.steps()]
    np.testing.assert_array_equal(got.tokens, want.tokens)


@pytest.mark.parametrize("name", ["dspark", "reduced", "dflash", "dflash2"])
def test_the_step_brings_no_value_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, where any value that is asked for raises; rows gathered one by one included. The candidates'
    kernel takes what it is given.
    """

    def candidates(logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor, *more):
        assert all(t.is_contiguous() for t in (logits, keys, temperature)) and logits.dtype == torch.float32
        return best_candidates(logits, keys, temperature, *more)

    monkeypatch.setattr(attention, "_GATHERED_BYTES", 1)
    config, small = CONFIGS[name], [np.zeros((4, 3), np.int32)] + [np.zeros(4, np.int32)] * 3
    policy = build_decoder(config.policy, "meta", kernels="torch", aux_layers=config.aux_layers)
    drafter = TorchBlock(policy, BlockModel(config))
    drafter.ops = drafter.ops._replace(best_candidates=candidates)
    tables, *columns = small
    rows = DraftingRows(*columns, tables, tables, np.zeros(4, np.uint64), np.zeros(4, np.float32), *columns[:2])
    steps = drafter.row_drafter(drafter.new_kv_cache(8, 16), rows, torch.empty(128, 64, device="meta")).steps()
    assert [key for key, _ in steps] == [("drafter", n) for n in (4, 2, 1)]
    for _, step in steps:
        step()


def test_copied_blocks_serve_another_row_and_a_decoder_of_other_layers_is_refused() -> None:
    rows = rows_of(loaded("dspark"), [70, 70])
    rows.rows.keys[1] = rows.rows.keys[0]
    rows.feed(0, 1, 69)
    rows.rows.synced[rows.rows.slot[1]] = 68
    rows.drafter.copy_blocks(rows.kv, rows.tables[0].tolist(), rows.tables[1].tolist())
    drafted = rows.draft(4)
    assert of_row(drafted, 0).tokens.tolist() == of_row(drafted, 1).tokens.tolist()
    assert rows.kv.nbytes == rows.kv.num_blocks * rows.drafter.kv_bytes_per_block(16)
    with pytest.raises(BackendError, match=r"a drafter of layers \(0, 2, 5\), a decoder that returns \(\)"):
        TorchBlock(build_decoder(TIED, kernels="torch"), BlockModel(CONFIGS["dspark"]))


@every
def test_training_computes_what_rollouts_do(name: str) -> None:
    """At every base of a packed batch, a window that begins late among it; later tokens and states change nothing."""
    config = CONFIGS[name]
    model, weights = BlockModel(config), random_drafter(config)
    model.load_full(weights.items())
    embed, head = lookup_tables(config.policy)
    sequences = [random_sequence(config, n, p, seed=p) for n, p in ((9, 4), (30, 17), (6, 1))]
    sequences = [replace(s, drawn=np.arange(s.length) >= s.first_base + 1) for s in sequences]
    batch = collate(sequences)
    layout = PairLayout(batch)
    outputs = model.unroll(embed, batch, layout, config.num_drafted)
    row = 0
    for start, s in zip(batch.starts, sequences, strict=False):
        for base in range(s.first_base, s.length - 1):
            slots = expected_slots(config, embed, weights, int(s.token_ids[base]), s.hidden[:base])
            for k in range(min(config.num_drafted, s.length - 1 - base)):
                before = int(s.token_ids[base + k])
                want = expected_logits(config, head, weights, slots, k, before)
                got = spread(model, model.logits(outputs[k][row], head))
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            assert int(layout.bases[row]) == start + base
            row += 1
    assert row == len(layout.bases)


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_gradients_of_a_block_are_those_of_plain_pytorch(name: str) -> None:
    config = CONFIGS[name]
    model, weights = BlockModel(config), random_drafter(config)
    model.load_full(weights.items())
    embed, sequence = lookup_tables(config.policy)[0], random_sequence(config, 30, 17)
    batch = collate([sequence])
    given = {n: p for n, p in model.named_parameters() if not n.startswith(("markov_head", "candidate_selector"))}
    slots = model.fill(embed, batch, PairLayout(batch), np.array([5]))[0]
    base, leaves = sequence.first_base + 5, {n: weights[n].requires_grad_() for n in given}
    want = expected_slots(config, embed, leaves, int(sequence.token_ids[base]), sequence.hidden[:base])
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    found = (torch.autograd.grad(t, list(of.values()), upstream) for t, of in ((slots, given), (want, leaves)))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"aux_layers": (3, 1)}, r"layers = \[3, 1\]: must be ascending layers of 0 \.\. 6"),
        ({"aux_layers": (0, 7)}, r"must be ascending layers of 0 \.\. 6"),
        ({"aux_layers": ()}, "must be ascending layers"),
        ({"mask_token_id": 101}, "mask_token_id = 101: must be a row of the policy's embedding"),
        ({"block_size": 1}, "block_size = 1: must be 2 or more"),
        ({"windows": (6, 0)}, r"sliding_window = \[6, 0\]: must be above 6, the block"),
        ({"selector_rank": 12}, "selector_rank = 12: needs DFlash's alignment"),
    ],
)
def test_sizes_that_a_policy_does_not_have_are_refused(more: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        block_config(TIED, **more)


@both
def test_as_many_layers_are_read_as_every_decoder_returns(kernels: str) -> None:
    """One more is refused before a decoder is made."""
    deep = replace(TIED, num_layers=20)
    most = block_config(deep, aux_layers=tuple(range(16))).aux_layers
    assert build_decoder(deep, kernels=kernels, aux_layers=most).aux_layers == most
    with pytest.raises(ConfigError, match=r"must be ascending layers of 0 \.\. 18, 16 at most"):
        block_config(deep, aux_layers=tuple(range(17)))


def test_a_new_drafter_starts_with_the_policys_final_norm() -> None:
    """Behind which the policy's LM head, which is the drafter's, reads."""
    weights, model = dict(random_weights(TIED)), BlockModel(CONFIGS["dspark"])
    head = weights["model.embed_tokens.weight"]
    model.start_fresh(0, weights.__getitem__, head, torch.ones(TIED.vocab_size, dtype=torch.int64))
    assert torch.equal(model.norm.weight, weights["model.norm.weight"])


def test_layers_are_spread_as_in_published_drafters() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)  # Qwen3 8B
    assert spread_layers(12, 3) == (1, 5, 9)
    for count in range(4, 40):
        layers = BlockConfig.fresh(replace(TIED, num_layers=count)).aux_layers
        assert len(set(layers)) == 3 and layers[0] >= 0 and layers[-1] <= count - 2
    with pytest.raises(ConfigError, match="num_hidden_layers = 3"):
        spread_layers(3, 3)

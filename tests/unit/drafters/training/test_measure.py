"""Acceptance measured in one pass is what drafting from every place of the responses would give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.decoder import BUCKETS, POSITIONS, DraftingRows, Pairs
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.model import EagleModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.eagle.torch_decoder import TorchEagle
from megatron_tlt.drafters.eagle3.model import Eagle3Model
from megatron_tlt.drafters.training.batching import DraftSequence, collate, windows
from megatron_tlt.drafters.training.measure import MeasuredAcceptance, measure
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.keys import request_key
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.tiny_drafters import DEEP, FAMILIES, lookup_tables, random_drafter, random_sequence, spread
from tests.helpers.tiny_models import random_weights

CONFIG = replace(FAMILIES["qwen3"], vocab_size=3)  # few tokens: drafts match by chance
STEPS = 4


@pytest.fixture(scope="module")
def eagle() -> TorchEagle:
    policy = build_decoder(CONFIG, kernels="torch")
    policy.load_weights(random_weights(CONFIG))
    eagle = TorchEagle(policy, EagleModel(EagleConfig.of(policy.config)))
    eagle.load_weights(random_drafter(CONFIG).items())
    return eagle


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    weights = dict(random_weights(CONFIG))
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


def responses(*shapes: tuple[int, int]) -> list[DraftSequence]:
    return [replace(random_sequence(CONFIG, n, p, seed=i), key=request_key(7, i, 2)) for i, (n, p) in enumerate(shapes)]


def run(
    sequences: list[DraftSequence], temperature: float, window: int = 512, config: ModelConfig = CONFIG
) -> MeasuredAcceptance:
    model = EagleModel(EagleConfig.of(config))
    model.load_full(random_drafter(config).items())
    sizes = {"steps": STEPS, "temperature": temperature, "batch_tokens": 60, "window": window}
    return measure(model, *tables(), sequences, **sizes)


def draft_from(eagle: TorchEagle, s: DraftSequence, base: int, prompt_len: int, temperature: float) -> list[int]:
    """The tokens that the decoder drafts behind place `base` of (a window of) a sequence."""
    kv, last = eagle.new_kv_cache(8, 16), s.offset + base
    pages = torch.zeros(128, CONFIG.hidden_size)
    pages[s.offset : last] = s.hidden[:base]
    positions = np.arange(s.offset + 1, last, dtype=np.int32)
    tokens = s.token_ids[1:base].numpy().astype(np.int32)
    eagle.feed(Pairs(tokens, positions, positions, positions - np.int32(1)), pages, kv)

    def one(value: int | float, dtype: type = np.int32) -> np.ndarray:
        return np.array([value], dtype)

    drawn = last + 1 - prompt_len
    outputs = np.zeros((1, max(1, drawn)), np.int32)
    outputs[0, -1] = s.token_ids[base]
    rows = DraftingRows(
        slot=one(0),
        positions=one(last),
        output_len=one(drawn),
        block_tables=np.arange(8, dtype=np.int32)[None],
        outputs=outputs,
        keys=one(s.key, np.uint64),
        temperature=one(temperature, np.float32),
        synced=one(last - 1),
        first=one(s.offset + 1),
    )
    rates = np.ones((POSITIONS, BUCKETS), np.float32)
    drafted = eagle.row_drafter(kv, rows, pages).draft(one(STEPS), rates, 0.0)
    tokens: list[int] = drafted.tokens.tolist()
    return tokens


@pytest.mark.parametrize(("temperature", "window"), [(1.0, 512), (0.6, 16), (0.0, 16)])
def test_matches_are_those_of_real_drafts(eagle: TorchEagle, temperature: float, window: int) -> None:
    sequences = responses((40, 6), (12, 1), (60, 20), (3, 2))
    got = run(sequences, temperature, window)
    reached, matched, bases = np.zeros(STEPS), np.zeros(STEPS), 0
    for whole in sequences:
        for s in windows(whole, window):
            for base in range(s.first_base, s.length - 1):
                bases += 1
                drafted = draft_from(eagle, s, base, whole.response_start, temperature)
                for step in range(min(STEPS, s.length - 1 - base)):
                    reached[step] += 1
                    if drafted[step] != s.token_ids[base + step + 1]:
                        break
                    matched[step] += 1
    assert matched[1] > 0, "the test needs matches"
    assert got.bases == bases == sum(s.num_bases for s in sequences)
    np.testing.assert_array_equal(got.sums[:, 2], reached)
    np.testing.assert_array_equal(got.sums[:, 3], matched)
    assert got.accepted_length == pytest.approx(matched.sum() / bases)
    assert got.coupled == pytest.approx((matched / reached).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_overlap_of_a_reduced_vocabulary_is_over_the_whole(temperature: float) -> None:
    """A token outside the drafter's vocabulary cannot be accepted: its share of the policy's distribution is lost."""
    shape = Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=70)
    sequences = [random_sequence(shape, n, 3, seed=n) for n in (12, 20, 26)]
    (embed, head), model = lookup_tables(shape.policy), Eagle3Model(shape)
    model.load_full(random_drafter(shape).items())
    sizes = {"steps": 3, "temperature": temperature, "batch_tokens": 64, "window": 512}
    got, batch = measure(model, embed, head, sequences, **sizes), collate(sequences)
    with torch.no_grad():
        outputs = model.unroll(embed, batch, PairLayout(batch), 3)
    layout, want = PairLayout(batch), []
    for step, output in enumerate(outputs):
        there = layout.existing(step)
        target = batch.hidden[layout.base_rows[there] + step, -head.shape[1] :]
        q = (spread(model, model.logits(output[there])) / temperature).softmax(-1)
        want.append(float(torch.minimum((target @ head.T / temperature).softmax(-1), q).sum(-1).mean()))
    assert got.overlap == pytest.approx(want, abs=1e-5)

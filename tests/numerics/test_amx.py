"""The products on AMX tiles, with the tiles' instructions in plain C, so that every machine runs them."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.decoders.native import abi
from tests.helpers.tiny_models import Driver, random_weights
from tests.numerics.test_invariance import CONFIGS, tokens

EMULATION = Path(__file__).parents[1] / "helpers" / "amx_emulation.h"


def make(name: str) -> Decoder:
    decoder = build_decoder(CONFIGS[name], dtype=torch.bfloat16, kernels="native")
    decoder.load_weights(random_weights(CONFIGS[name]))
    return decoder


def on_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    version = zlib.crc32(EMULATION.read_bytes())  # or a library of an earlier text would be taken
    emulated = abi._load(("-DTLT_BF16", f'-DTLT_EMULATE="{EMULATION}"', f"-DVERSION={version}", "-Wno-psabi"))
    assert emulated.tlt_form() == b"AMX"
    with monkeypatch.context() as patch:
        for module in ("decoder", "parts"):
            patch.setattr(f"megatron_tlt.models.decoders.native.{module}.library", lambda bf16: emulated)
        return make(name)


@pytest.mark.parametrize("name", ["gqa3", "odd head", "wide group", "experts"])
def test_tiles_compute_what_vectors_do_and_a_row_alone_as_among_others(name: str, monkeypatch: pytest.MonkeyPatch):
    """1 to 70 rows: less than a tile, one, two, and several blocks of two; widths that are no multiple of a tile."""
    tiles = on_tiles(name, monkeypatch)
    prompt = tokens(70, 1)
    alone, vectors = Driver(tiles), Driver(make(name))
    whole, other = alone.step([(0, prompt)]).logits, vectors.step([(0, prompt)]).logits
    if name != "experts":  # rounding chooses those
        assert (whole - other).abs().mean() <= 0.01 * other.abs().mean()
    assert torch.equal(torch.cat([Driver(tiles).step([(0, prompt[:9])]).logits, whole[9:]]), whole)
    want = alone.step([(0, [7])]).logits[0]
    for others in (1, 15, 16, 17, 32, 45, 69):
        shared = Driver(tiles, num_blocks=400, seed=others)
        shared.step([(i, tokens(1 + i % 9, i)) for i in range(1, others + 1)])
        shared.step([(0, prompt)])
        chunks = [(i, [3]) for i in range(1, others + 1)]
        chunks.insert(others // 2, (0, [7]))
        assert torch.equal(shared.step(chunks).logits[others // 2], want), others

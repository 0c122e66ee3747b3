from __future__ import annotations

import pytest
import torch

from megatron_tlt.drafter.eagle3.hidden_states import read_hidden_states
from megatron_tlt.models.factory import build_decoder
from tests.helpers.tiny_drafters import FAMILIES
from tests.helpers.tiny_models import Driver, random_weights

CONFIG = FAMILIES["qwen3"]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_hidden_states_are_those_of_each_text_alone(kernels: str) -> None:
    decoder = build_decoder(CONFIG, kernels=kernels)
    decoder.load_weights(random_weights(CONFIG))
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 101, (n,), generator=generator).tolist() for n in (5, 70, 16, 17, 1, 33)]
    together = list(
        read_hidden_states(decoder, texts, 16, max_tokens=60)
    )  # the second needs a forward of its own
    for text, hidden in zip(texts, together, strict=True):
        want = Driver(decoder).step([(0, text)]).hidden
        torch.testing.assert_close(hidden, want, atol=1e-5, rtol=1e-5)

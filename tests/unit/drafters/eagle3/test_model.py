"""The EAGLE-3 drafter: its layers, its vocabulary. Its arithmetic against the engines' readings is
in tests/unit/drafters/export/test_engines.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_tlt.drafters.eagle.config import Eagle3Config, default_layers
from megatron_tlt.drafters.eagle3.model import Eagle3Model
from megatron_tlt.drafters.model import most_frequent
from megatron_tlt.errors import ConfigError
from tests.helpers.tiny_drafters import DEEP, lookup_tables

CONFIG = Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=40)


def test_default_layers_are_the_engines_and_can_be_collected() -> None:
    assert default_layers(32) == (1, 15, 28)  # Llama 3.1 8B
    assert default_layers(36) == (1, 17, 32)  # Qwen3 8B
    for count in range(4, 80):
        policy = replace(DEEP["llama"], num_layers=count)
        layers = Eagle3Config.of(policy).aux_layers
        assert len(set(layers)) == 3
        assert max(layers) <= count - 2
    with pytest.raises(ConfigError, match="num_hidden_layers = 3"):
        default_layers(3)


@pytest.mark.parametrize("layers", [(1, 3), (1, 1, 4), (3, 1, 4), (-1, 1, 4), (1, 3, 7), (1, 2, 3, 4)])
def test_layers_out_of_reach_are_refused(layers) -> None:
    with pytest.raises(ConfigError, match=r"layers = .* must be three ascending layers of 0 \.\. 6"):
        Eagle3Config.of(DEEP["llama"], layers)


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = torch.tensor([3, 9, 0, 9, 1, 0])
    assert most_frequent(counts, 3).tolist() == [0, 1, 3]
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 4]


def test_the_head_begins_with_the_policys_rows_of_the_vocabulary() -> None:
    model, (_, head) = Eagle3Model(CONFIG), lookup_tables(CONFIG.policy)
    ids = torch.arange(0, 80, 2)
    model.initialise(0)
    model.set_vocabulary(ids)
    model.take_head(head)
    assert torch.equal(model.token_ids(), ids)
    assert torch.equal(model.lm_head.weight, head[ids])
    assert torch.equal(model.t2d.nonzero().flatten(), ids)
    whole = Eagle3Model(Eagle3Config.of(DEEP["qwen3"]))
    whole.initialise(0)
    whole.take_head(head)
    assert torch.equal(whole.lm_head.weight, head)
    for wrong in (ids[:5], ids.flip(0), ids + 60):
        with pytest.raises(ConfigError, match="must be 40 ascending ids below 101"):
            model.set_vocabulary(wrong)
    with pytest.raises(ConfigError, match="draft vocabulary"):
        whole.set_vocabulary(torch.arange(101))

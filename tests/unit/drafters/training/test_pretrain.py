from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_tlt.drafters.training.pretrain import lookup_tables
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_drafters import FAMILIES
from tests.helpers.tiny_models import random_weights

CONFIG = FAMILIES["qwen3"]


@pytest.mark.parametrize("tied", [True, False])
def test_lookup_tables_are_the_policys(tmp_path, tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    weights = dict(random_weights(config))
    save_hf(tmp_path, config, weights.items(), dtype=torch.bfloat16)
    embed, head = lookup_tables(tmp_path, config, torch.device("cpu"))
    assert embed.dtype == head.dtype == torch.float32
    assert torch.equal(embed, weights["model.embed_tokens.weight"].bfloat16().float())
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(head, weights[name].bfloat16().float())
    assert (embed is head) == tied

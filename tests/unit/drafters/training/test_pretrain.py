from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.drafters.training.pretrain import lookup_tables
from megatron_tlt.models.hf import loader
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.tiny_drafters import FAMILIES
from tests.helpers.tiny_models import random_weights

CONFIG = FAMILIES["qwen3"]


@pytest.mark.parametrize("tied", [True, False])
def test_lookup_tables_are_the_policys(tmp_path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other tensor is read."""
    config = replace(CONFIG, tie_word_embeddings=tied)
    weights = dict(random_weights(config))
    save_hf(tmp_path, config, weights.items(), dtype=torch.bfloat16)
    opened, reads = loader.open_tensors, list[str]()
    noted = lambda file: SimpleNamespace(get_tensor=lambda n: (reads.append(n), opened(file).get_tensor(n))[1])  # noqa: E731
    monkeypatch.setattr(loader, "open_tensors", noted)
    embed, head = lookup_tables(tmp_path, config, torch.device("cpu"))
    assert reads == ["model.embed_tokens.weight", "lm_head.weight"][: 2 - tied]
    assert embed.dtype == head.dtype == torch.float32
    assert torch.equal(embed, weights["model.embed_tokens.weight"].bfloat16().float())
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(head, weights[name].bfloat16().float())
    assert (embed is head) == tied

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_tlt.drafters.training import pretrain
from megatron_tlt.drafters.training.measure import MeasuredAcceptance
from megatron_tlt.drafters.training.pretrain import DrafterPretraining, lookup_tables
from megatron_tlt.models.hf import loader
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.types import SamplingParams, Trajectory
from tests.helpers.checked_configs import make, world_of
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


def test_ranks_wait_without_limit_for_one_that_reads_or_measures_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of responses are not shares of tokens, and the time of the collectives behind them is bounded."""
    calls: list[str] = []
    training: Any = object.__new__(DrafterPretraining)
    training._config = make()
    training._world = world_of(
        wait_for_all=lambda: calls.append("wait"), all_gather_object=lambda result: calls.append("gather") or [result]
    )
    training._backend = SimpleNamespace(read_responses=lambda *_: calls.append("read"))
    training._section, training._params, training._batch_tokens = training._config.drafter, SamplingParams(), 8
    training.model, training._tables = None, (None, None)
    assert training.read([Trajectory(0, 0, np.arange(5, dtype=np.int32), np.zeros(3, np.float32))]) == []
    monkeypatch.setattr(
        pretrain, "measure", lambda *_, steps, **__: calls.append("measure") or MeasuredAcceptance.empty(steps)
    )
    assert training.measure([]).bases == 0
    assert calls == ["read", "wait", "measure", "wait", "gather"]

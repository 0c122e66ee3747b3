from types import SimpleNamespace

import torch

from megatron_tlt.backends.vllm.backend import VllmBackend
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.models.config import EMBED, HEAD
from megatron_tlt.sync.served_weights import ServedWeights
from megatron_tlt.types import WeightBucket


def test_kept_tables_are_copied_in_place_from_the_second_push_on() -> None:
    process = SimpleNamespace(launch=SimpleNamespace(name="vLLM"))
    transport = SimpleNamespace(send=lambda version, tensors: None)
    weights = ServedWeights({EMBED: (5, 2), HEAD: (5, 2)}, (), False)
    rollout = RolloutSection(order="arrival", dtype="bf16")
    backend = VllmBackend(
        process, transport, weights, rollout, max_context=8, directory=None, keeps_tables=True
    )
    addresses = set()
    for version in (0, 1):
        pushed = {name: torch.full((5, 2), version + i / 2) for i, name in enumerate((EMBED, HEAD))}
        weights.begin(version)
        backend.update_weights(WeightBucket(version, list(pushed.items())))
        weights.commit({})
        tables = backend.lookup_tables()
        for table, tensor in zip(tables, pushed.values(), strict=True):
            assert table.dtype == torch.bfloat16 and torch.equal(table.float(), tensor)
        addresses.add(tuple(table.data_ptr() for table in tables))
        pushed[EMBED].fill_(9)  # the sender's buffer is used again
    assert len(addresses) == 1 and tables[0].eq(1).all()

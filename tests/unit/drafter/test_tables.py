from __future__ import annotations

import pytest
import torch

from megatron_tlt.drafter.tables import PolicyTables
from megatron_tlt.errors import DrafterError


def test_copies_by_version() -> None:
    tables = PolicyTables(torch.device("cpu"), torch.float32)
    embed, head = torch.randn(5, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    tables.set(3, embed, head)
    wanted = head.float()
    head.zero_()  # a push overwrites the engine's
    assert torch.equal(tables.get(3)[1], wanted) and tables.get(3)[0].dtype == torch.float32
    tables.set(4, embed, embed)
    assert tables.get(4)[0].data_ptr() == tables.get(4)[1].data_ptr()
    assert tables.get(3)[0].data_ptr() != tables.get(3)[1].data_ptr()
    tables.keep([4, 9])
    assert tables.versions() == [4] and 3 not in tables
    with pytest.raises(DrafterError, match=r"policy version 3 \(there are: 4\)"):
        tables.get(3)

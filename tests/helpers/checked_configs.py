"""Configurations of a small policy whose files are not there, and worlds, for the checks before a run."""

from types import SimpleNamespace
from typing import Any

from megatron_tlt.config.root import Config

ARCHITECTURE = {
    "family": "qwen3",
    "vocab_size": 288,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


def make(**sections) -> Config:
    model = {"path": "not/here", "architecture": ARCHITECTURE}
    tree = {"model": model, "data": {"train": {"tasks": [{"name": "chain_sum"}]}}}
    return Config.model_validate({**tree, **sections})


def world_of(**fields: Any) -> Any:
    """A rank's world: a single one on a CPU, where `fields` say nothing else."""
    import torch

    alone = {"device": torch.device("cpu"), "rank": 0, "size": 1, "local_size": 1, "is_main": True}
    calls = {
        "wait_for_all": lambda: None,
        "all_gather_object": lambda mine: [mine],
        "broadcast_object": lambda value: value,
    }
    return SimpleNamespace(**alone | calls | fields)

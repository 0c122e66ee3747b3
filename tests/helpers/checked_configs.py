"""Configurations of a small policy whose files are not there, for the checks before a run."""

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

"""The inputs from which a rollout engine of any kind is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_tlt.config.rollout import SyncSection

if TYPE_CHECKING:
    import torch

    from megatron_tlt.config.model import ModelSection
    from megatron_tlt.config.rollout import RolloutSection
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.tensor_parallel import TensorParallel
    from megatron_tlt.drafters.base import SavedDrafter


@dataclass(frozen=True)
class EngineOptions:
    """The configuration of one rank's engine, and the run's own values.

    `config.checks.backend` has passed: an option that a kind of engine does not support is at its default.
    """

    rollout: RolloutSection
    model: ModelSection
    sync: SyncSection = field(default_factory=SyncSection)
    device: torch.device | str = "cpu"
    tokenizer: HFTokenizer | None = None
    tp: TensorParallel | None = None
    """The tensor-parallel group of `rollout.tp` ranks, which build the engine together; None: one rank."""
    local_ranks: int = 1
    """Ranks that share this machine's memory."""
    longest_request: int = 0
    """Tokens of the longest prompt and response that will come: the cache must hold them. 0: not known."""
    drafter: SavedDrafter | None = None
    """A trained drafter in place of that in `rollout.speculation.drafter_path`."""
    keep_layers: tuple[int, ...] | None = None
    """Hidden states of responses will be collected: of these layers (a drafter's own) and the final one. The cache
    leaves room for them. None: none will be.
    """
    keep_routed_experts: bool = False
    """Samples get `routed_experts`."""
    keep_tables: bool = False
    """`lookup_tables` will be read."""
    takes_drafts: bool = False
    """Calls bring drafts (`GenerateCall.drafts`), whose verification is captured, too."""
    kv_cache_bytes: int | None = None
    """The KV cache of the memory plan, by default `rollout.kv_cache_mib`."""

    @property
    def max_request(self) -> int:
        """Most tokens of a request: `longest_request`, or all of the context where it is not known."""
        return self.longest_request or self.model.max_context

"""The rank grid, as pure arithmetic. Torch-free.

Ranks are laid out as megatron-core does ("tp-cp-dp-pp"): tensor parallel fastest, pipeline parallel slowest. Expert
parallel adds no rank: it takes neighbouring ones from tp x cp x dp of a pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits in the grid."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Dims:
    """Sizes of the parallel dimensions of the actor."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def fit(cls, world_size: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Dims:
        """The grid over `world_size` ranks; data parallel takes what is left.

        Raises ConfigError if tp * pp * cp does not divide the world, or ep not a pipeline stage's ranks.
        """
        block = tp * pp * cp
        if block > world_size or world_size % block:
            allowed = f"tp * pp * cp must divide the number of ranks ({world_size})"
            raise ConfigError.of("actor.tp * actor.pp * actor.cp", f"{tp} * {pp} * {cp} = {block}", allowed)
        if world_size // pp % ep:
            raise ConfigError.of("actor.ep", ep, f"must divide the ranks of a pipeline stage ({world_size // pp})")
        return cls(tp=tp, cp=cp, dp=world_size // block, pp=pp, ep=ep)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Grid position of a global rank."""
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        return Coordinates(tp=tp, cp=cp, dp=rest % self.dp, pp=rest // self.dp)

    def rank_at(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank of a grid position."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def replica_ranks(self, dp: int) -> list[int]:
        """All ranks that hold one data-parallel replica of the policy, and so need the same sequences."""
        return [self.rank_at(tp, cp, dp, pp) for pp in range(self.pp) for cp in range(self.cp) for tp in range(self.tp)]

    def pipeline_ranks(self, rank: int) -> list[int]:
        """Ranks of the pipeline that `rank` is part of, first stage first."""
        at = self.coordinates(rank)
        return [self.rank_at(at.tp, at.cp, at.dp, pp) for pp in range(self.pp)]


def rollout_replica(rank: int, rollout_tp: int) -> int:
    """The engine of a rank: `rollout_tp` consecutive ranks form one replica."""
    return rank // rollout_tp


def is_first_of_engine(rank: int, rollout_tp: int) -> bool:
    """Whether it is the first rank of its engine, which alone judges responses and asks environments."""
    return rank % rollout_tp == 0

"""Exchange of responses with hidden states between engine replicas, once a merge.

A replica trains while it waits because its own responses were short, and drafts are needed most for the long ones. So
after each merge a few replicas, in turns, broadcast the longest responses in their buffers, and all others add them to
theirs. The bytes sent are bounded, whatever the number of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.distributed.world import World
    from megatron_tlt.drafters.training.buffer import HiddenStateBuffer

_MIN_SENDER_BYTES = 4 << 20  # of one sender; with less in all, fewer send at a time
_MAX_SENDERS = 4  # more bytes in all make for longer responses, not for more senders


@dataclass(frozen=True, slots=True)
class HiddenStateSharing:
    """Which replicas send, and how much. The same on every rank but for `replica` and `is_leader`."""

    replica: int = 0
    num_replicas: int = 1
    ranks_per_replica: int = 1
    bytes: int = 0  # sent after a merge by all senders together; 0: nothing is shared
    is_leader: bool = True  # the first rank of its replica, which sends

    def senders(self, turn: int) -> list[int]:
        """Replicas that send in exchange number `turn`; none with one replica or without bytes."""
        if self.num_replicas == 1 or not self.bytes:
            return []
        count = min(self.num_replicas, _MAX_SENDERS, max(1, self.bytes // _MIN_SENDER_BYTES))
        return sorted((turn * count + i) % self.num_replicas for i in range(count))

    def exchange(self, world: World, buffer: HiddenStateBuffer, turn: int) -> None:
        """Adds the longest responses of this turn's senders to the buffers of all other replicas.

        Collective; `turn` is the same on all ranks. Mutates `buffer`.
        """
        senders, mine = self.senders(turn), None
        if self.replica in senders and self.is_leader:
            mine = buffer.longest(self.bytes // len(senders))
        for sender in senders:
            responses = world.broadcast_object(mine, sender * self.ranks_per_replica)
            if sender != self.replica:
                for key, response in responses:
                    buffer.add_shared(key, response)

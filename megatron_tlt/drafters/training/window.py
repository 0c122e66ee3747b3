"""`Window`: what one rank trains of the drafter between two merges, which it can take back."""

from __future__ import annotations

from megatron_tlt.drafters.training.training_state import TrainingState


class Window:
    """Begins with the first micro-step after a merge; is closed by the next merge, and taken back by a failure."""

    def __init__(self, state: TrainingState):
        self._state = state
        self.is_begun = False  # else the state is that of the last merge
        self.tokens = 0  # response tokens trained on
        self.seconds = 0.0  # in micro-steps

    def begin(self) -> None:
        """Copies the state, which a micro-step changes next, unless the window has begun."""
        if not self.is_begun:
            self._state.remember()
            self.is_begun = True

    def add(self, tokens: int, seconds: float) -> None:
        """A micro-step was made."""
        self.tokens += tokens
        self.seconds += seconds

    def close(self) -> None:
        """The state is what the next window begins with."""
        self.is_begun, self.tokens, self.seconds = False, 0, 0.0

    def take_back(self) -> None:
        """The state is again that of the last merge. No rank waits for another."""
        if self.is_begun:
            self._state.restore()
        self.close()

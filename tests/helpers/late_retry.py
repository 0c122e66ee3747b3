"""`retry` with answers that come after a while, another one each time."""

from __future__ import annotations

import random
import time

from megatron_tlt.envs.base import Step
from megatron_tlt.envs.retry import Retry


class LateRetry(Retry):
    """Each step takes up to `most_s` seconds, by chance."""

    def __init__(self, most_s: float):
        super().__init__(tries=3)
        self._most_s = most_s

    def step(self, response: str) -> Step:
        time.sleep(random.uniform(0.0, self._most_s))
        return super().step(response)

"""Says that Triton compiles while it does: a first start takes a minute for it without another sign."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from triton import knobs

_log = logging.getLogger(__name__)

_CACHED_S = 0.1  # a kernel of Triton's cache on disk takes less
_EVERY_S = 10.0  # seconds of compiling between two lines


class CompileLog:
    """Triton's hooks before and after a kernel is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.kernels = 0  # compiled, not read from the cache on disk
        self.seconds = 0.0
        self._clock, self._started, self._next = clock, 0.0, 0.0

    def before(self, **_: Any) -> None:
        """A kernel is compiled, or read from the cache, next."""
        self._started = self._clock()

    def after(self, *, fn: Any, **_: Any) -> None:
        """It is there. Logs the first compiled one, then every ten seconds of compiling how many there are."""
        seconds = self._clock() - self._started
        if seconds < _CACHED_S:
            return
        self.kernels += 1
        self.seconds += seconds
        if self.kernels == 1:
            about = "a first start compiles some 50, a minute or two; later ones read Triton's cache"
            _log.info("Triton compiled kernel %s in %.1f s: %s", fn.name, seconds, about)
        elif self.seconds >= self._next:
            _log.info("Triton has compiled %d kernels in %.0f s", self.kernels, self.seconds)
        else:
            return
        self._next = self.seconds + _EVERY_S


def log_compiles() -> None:
    """From now on this process logs what Triton compiles. A second call, or hooks of others, leave it as it is."""
    if knobs.runtime.jit_cache_hook is None and knobs.runtime.jit_post_compile_hook is None:
        log = CompileLog()
        knobs.runtime.jit_cache_hook = log.before
        knobs.runtime.jit_post_compile_hook = log.after

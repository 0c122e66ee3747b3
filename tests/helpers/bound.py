"""A process bound to one CPU, as a launcher binds ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def to_one_cpu() -> Iterator[set[int]]:
    """Binds this thread and what it starts to one of its CPUs; yields all of them."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        yield cpus
    finally:
        os.sched_setaffinity(0, cpus)

"""The rank's side of one environment worker."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from megatron_tlt.config.env import EnvSection
from megatron_tlt.envs.worker import environment_host
from megatron_tlt.workers.user_code import loaded_code
from megatron_tlt.workers.worker import Worker


class EnvWorker(Worker):
    """A worker that holds the environments of many trajectories."""

    def __init__(self, section: EnvSection, *, in_thought: bool = False, cpus: Collection[int] = ()):
        """`in_thought`: see `load_environment`; `cpus`: see `set_up`."""
        make = partial(environment_host, section.model_dump_json(), in_thought)
        super().__init__(make, loaded_code(section.path), section.worker_memory_mib, section.timeout_s, cpus)
        self.load = 0  # trajectories that have been given to this worker and have not ended
        self.close_failures: list[str] = []  # of environments that have been discarded; not yet logged

"""One real Slurm for all tests here; the scenarios run side by side, for most of their time is waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.slurm.cluster import Cluster, missing
from tests.integration.slurm.scenarios import SCENARIOS, Scene, make_template


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Six virtual nodes. Skips where Slurm cannot be installed; `.ci/run` installs it."""
    if absent := missing():
        pytest.skip(
            f"Slurm is not installed (no {', '.join(absent)}): apt-get install --no-install-recommends slurm-wlm munge"
        )
    slurm = Cluster(tmp_path_factory.mktemp("slurm") / "home", count=6)
    try:
        slurm.up()
        yield slurm
    finally:
        slurm.down()


@pytest.fixture(scope="module")
def scenes(cluster, tmp_path_factory):
    """Name: a future of its `Scene`, played."""
    folder = tmp_path_factory.mktemp("scenes")
    template = make_template(tmp_path_factory.mktemp("template"))
    stages = {name: Scene(cluster, folder / name, template) for name in SCENARIOS}
    pool = ThreadPoolExecutor(4)
    try:
        yield {name: pool.submit(SCENARIOS[name], stages[name]) for name in SCENARIOS}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # those that still wait fail when the cluster goes

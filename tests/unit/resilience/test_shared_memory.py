"""Directories of weights that killed jobs left in /dev/shm go, those of living ones stay."""

import fcntl
import os
import time

from megatron_tlt.resilience.shared_memory import sweep_shared_memory


def test_directories_of_weights_stay_while_they_are_young_or_their_owner_holds_a_lock(tmp_path):
    dead, alive, young = (tmp_path / name for name in ("tlt-dead", "tlt-alive", "tlt-young"))
    for path in (dead, alive, tmp_path / "other", tmp_path / "target"):
        path.mkdir()
        (path / "0").write_text("weights")
    (tmp_path / "tlt-link").symlink_to(tmp_path / "target")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    time.sleep(0.3)
    young.mkdir()
    assert sweep_shared_memory(tmp_path, young_s=0.2) == ["tlt-dead"]
    os.close(fd)
    time.sleep(0.3)
    assert sorted(sweep_shared_memory(tmp_path, young_s=0.2)) == ["tlt-alive", "tlt-young"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "target", "tlt-link"]

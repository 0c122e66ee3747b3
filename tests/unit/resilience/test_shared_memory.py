"""Files of killed MPI jobs in /dev/shm go, those of living ones stay."""

import fcntl
import mmap
import os
import time

from megatron_tlt.resilience.shared_memory import sweep_shared_memory


def test_only_old_mpich_files_that_no_process_holds_are_removed(tmp_path):
    names = [
        "mpich_shm_1a2b_0",
        "mpich_shm_3c4d_0",
        "mpich_shm_5e6f_1",
        "mpich_shm_new_",
        "other",
        "mpich_shm_77_0",
    ]
    left, opened, mapped, *_, young = paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(bytes(4096))
    (tmp_path / "mpich_shm_99_0").symlink_to(left)
    with opened.open("rb"), mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
        file.close()
        time.sleep(0.3)
        os.utime(young)
        assert sweep_shared_memory(tmp_path, young_s=0.2) == [left.name]
        memory.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names[1:], "mpich_shm_99_0"])
    time.sleep(0.3)
    assert sorted(sweep_shared_memory(tmp_path, young_s=0.2)) == sorted(
        [opened.name, mapped.name, young.name]
    )


def test_directories_of_weights_stay_while_their_owner_holds_a_lock(tmp_path):
    dead, alive = tmp_path / "tlt-dead", tmp_path / "tlt-alive"
    for path in (dead, alive):
        path.mkdir()
        (path / "0").write_text("weights")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    time.sleep(0.3)
    assert sweep_shared_memory(tmp_path, young_s=0.2) == ["tlt-dead"]
    os.close(fd)
    assert sweep_shared_memory(tmp_path, young_s=0.2) == ["tlt-alive"]

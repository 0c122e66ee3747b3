"""The adapter to vLLM: compares the installed vLLM with `compat`, then starts an engine with our extension."""

from __future__ import annotations

from typing import Any

from megatron_tlt.backends.vllm.plugin import compat

_HERE = __name__.rpartition(".")[0]
_EAGLE = "EagleQwen3ForCausalLM"


def version() -> str:
    """Version of the vLLM in this environment, without its build ("+cpu")."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def register() -> None:
    """Makes our drafter known to vLLM. A second call does nothing."""
    from vllm import ModelRegistry

    if _EAGLE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(_EAGLE, f"{_HERE}.eagle_qwen3:{_EAGLE}")


def start_engine(arguments: dict[str, Any]) -> Any:
    """A `vllm.LLMEngine` in this process. Raises RuntimeError where vLLM is not as recorded in `compat`."""
    found = compat.differences(version())
    if found:
        raise RuntimeError("this vLLM does not fit the plugin: " + "; ".join(found))
    register()
    from vllm import EngineArgs, LLMEngine

    extension = f"{_HERE}.extension.VllmWorkerExtension"
    return LLMEngine.from_engine_args(EngineArgs(**arguments, worker_extension_cls=extension))


def vllm_sampling_params(arguments: dict[str, Any], extra: dict[str, Any]) -> Any:
    """vLLM's parameters of one request: when it ends; how it is sampled is in `extra`."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=arguments["max_tokens"],
        stop_token_ids=arguments["stop_token_ids"],
        ignore_eos=True,  # the ends are among stop_token_ids
        detokenize=False,
        extra_args=extra,
    )

"""The adapter to vLLM: compares the installed vLLM with `compat`, then starts an engine with our extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_tlt.backends.vllm.plugin import compat
from megatron_tlt.errors import ConfigError, ConfigProblem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatron_tlt.backends.token_drafts import Lists

_HERE = __name__.rpartition(".")[0]
_CLASSES = {"EagleQwen3ForCausalLM": "eagle_qwen3", "DFlashBlockForCausalLM": "block_drafter"}


def version() -> str:
    """Version of the vLLM in this environment, without its build ("+cpu")."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def device_type() -> str:
    """The type of device that this build of vLLM computes on: "cpu", "cuda"; empty where it finds none."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def register() -> None:
    """Makes our drafters known to vLLM. A second call does nothing."""
    from vllm import ModelRegistry

    for name, module in _CLASSES.items():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"{_HERE}.{module}:{name}")


class TokenProposer:
    """vLLM's `custom_class` proposer: drafts what `source` returns, nothing before it is set."""

    def __init__(self, vllm_config: Any):
        """As vLLM calls it."""
        self.source: Callable[[Lists], Lists] | None = None

    def load_model(self, target_model: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: Lists, *args: Any, **kwargs: Any) -> Lists:
        """Drafts of every row; none for one whose prompt is still being read."""
        return [[] for _ in sampled_token_ids] if self.source is None else self.source(sampled_token_ids)


def start_engine(arguments: dict[str, Any], records_routers: bool) -> Any:
    """A `vllm.LLMEngine` in this process; `records_routers`: what its routers choose can be read. Raises RuntimeError
    where vLLM is not as recorded in `compat`, and ConfigError for arguments that it does not have.
    """
    found = compat.differences(version())
    if found:
        raise RuntimeError("this vLLM does not fit the plugin: " + "; ".join(found))
    check_arguments(arguments)
    register()
    if arguments.get("tensor_parallel_size", 1) > 1:
        compat.reduce_by_gloo()
    if records_routers:
        compat.bind_routers_at_load()
    from vllm import EngineArgs, LLMEngine

    extension = f"{_HERE}.extension.VllmWorkerExtension"
    return LLMEngine.from_engine_args(EngineArgs(**arguments, worker_extension_cls=extension))


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for names that vLLM's `EngineArgs` lacks: only `rollout.vllm.engine` can bring them."""
    from vllm import EngineArgs

    known, here = EngineArgs.__dataclass_fields__, "rollout.vllm.engine"
    problems = [
        ConfigProblem(f"{here}.{name}", value, f"is no argument of vLLM {version()}{did_you_mean(name, known)}")
        for name, value in arguments.items()
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)


def sleep_cache(engine: Any) -> None:
    """Gives back the memory of the KV cache and of hidden states; only without requests. vLLM asks for a pause first,
    which ends when all memory is there again. Its scheduler counts a request that has ended until the step behind it.
    """
    if compat.has_requests(engine):
        engine.step()
    engine.collective_rpc("tlt_release")
    engine.sleep(level=0)
    engine.release_kv_cache_memory()


def sleep_weights(engine: Any) -> None:
    """Gives back weights and KV cache, whatever of them is there; buffers stay, and the drafter's parameters (see
    `engine_args`). Only without requests.
    """
    engine.sleep(level=2)


def wake(engine: Any, tags: list[str]) -> None:
    """Takes the memory of "weights" or "kv_cache" again, at its addresses, with arbitrary contents."""
    engine.wake_up(tags=tags)


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

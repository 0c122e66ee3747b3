"""`DrafterKind`: all that depends on the kind of a trained drafter, in one object. `registry` finds it by name.

Facts for configuration, planning and simulation are torch-free: `config.drafter_kinds.DrafterFacts`.

Legend: H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from megatron_tlt.config.drafter_kinds import DrafterFacts, vllm_layers_problem
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.decoder import DrafterDecoder
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.drafters.model import DrafterConfig, DrafterModel
from megatron_tlt.drafters.published import PublicForm
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.decoders.base import Decoder
from megatron_tlt.models.hf.config import ModelConfig

Format = Literal["hf", "sglang", "trtllm", "vllm"]
FORMATS: tuple[Format, ...] = get_args(Format)
ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}

ConfigT = TypeVar("ConfigT", bound=DrafterConfig)
ModelT = TypeVar("ModelT", bound=DrafterModel)

LossParts = dict[str, list[Tensor]]  # means by drafted position, 0-d


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    """All tensors of a drafter, on the CPU, and where they come from."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]
    policy_version: int = 0  # of the policy whose hidden states it was last trained on
    trained_steps: int = 0
    fingerprint: str = ""  # `policy_fingerprint` of its policy


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """One export, in memory: tensor files and JSON files by file name, and its README.md."""

    tensors: dict[str, dict[str, Tensor]]
    json: dict[str, dict[str, Any]]
    card: str = ""


class DrafterKind(ABC, Generic[ConfigT, ModelT]):
    """One kind of trained drafter, whose shape is a ConfigT and which is a ModelT in training."""

    facts: DrafterFacts
    title: str  # in model cards
    paper: str
    public: PublicForm | None = None

    # -- its shape, in configurations and in config.json ------------------------------------------------------

    @abstractmethod
    def fresh(self, section: SpeculationSection, policy: ModelConfig) -> ConfigT:
        """A drafter of `policy`, not trained yet. Raises ConfigError for layers that the policy does not have."""

    def entries(self, config: ConfigT) -> dict[str, Any]:
        """The entries of config.json beside the policy's shape; `read_entries` reads them."""
        return {}

    @abstractmethod
    def read_entries(self, about: Mapping[str, Any], policy: ModelConfig) -> ConfigT:
        """The drafter of such entries. Raises ConfigError or CheckpointError for entries that it never returns."""

    # -- in rollouts and in training --------------------------------------------------------------------------

    @abstractmethod
    def build_decoder(self, policy: Decoder, config: ConfigT, threads: int = 1) -> DrafterDecoder:
        """The drafter beside the policy's decoder in the rollout engine; load weights next. Raises BackendError for a
        decoder that it does not go with.
        """

    @abstractmethod
    def build_model(self, config: ConfigT) -> ModelT:
        """The drafter in training; its weights are not set."""

    @property
    @abstractmethod
    def loss_parts(self) -> tuple[str, ...]:
        """Names of the loss's parts; `accept`, 1 - TV, is one of them."""

    @abstractmethod
    def loss(
        self, model: ModelT, given: LossInputs, forward: AbstractContextManager[object]
    ) -> tuple[Tensor, LossParts]:
        """The loss (0-d, differentiable) of a batch and its parts by drafted position. The model's forward runs inside
        `forward`.
        """

    # -- exports ----------------------------------------------------------------------------------------------

    @abstractmethod
    def engine_problem(self, config: ConfigT, engine: Format) -> str | None:
        """What `engine` lacks to serve such a drafter; None: nothing."""

    def require_engine(self, config: ConfigT, engine: Format) -> None:
        """Raises ConfigError, with the formats of an export that do, where there is an `engine_problem`."""
        if problem := self.engine_problem(config, engine):
            others = [form for form in FORMATS if form == "hf" or self.engine_problem(config, form) is None]
            kind = "eagle" if engine == "vllm" and vllm_layers_problem(config.policy.family) else "eagle3"
            instead = f"train a drafter of kind {kind}, or use --format {' or '.join(others)}"
            raise ConfigError.of("format", engine, f"{problem}: {instead}")

    @abstractmethod
    def engine_files(
        self, config: ConfigT, weights: Mapping[str, Tensor], engine: Format, dtype: torch.dtype
    ) -> ExportFiles:
        """The files that `engine` reads. Raises ConfigError as `require_engine`."""

    def engine_tensors(self, config: ConfigT, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as serving engines name them. The reduced vocabulary of a drafter that has no LM head of its own
        is left out: engines have none for it, and draft through the policy's whole head.
        """
        left_out = () if "lm_head.weight" in weights else config.vocabulary_shapes()
        named = {name: tensor for name, tensor in weights.items() if name not in left_out}
        return {n.replace("layer.", "layers.0.", 1) if n.startswith("layer.") else n: t for n, t in named.items()}

    def was_served_by(self, config: ConfigT) -> tuple[Format, ...]:
        """Engines that ran an export of such a drafter in a test."""
        return ("vllm",)

    def card_rows(self, config: ConfigT) -> str:
        """More rows of the table in a model card."""
        return ""

    def serving_notes(self, engine: Format) -> str:
        """Sentences of a model card on what an export for `engine` shares with the policy, each with a space behind."""
        return ""

    def serving_options(self, config: ConfigT) -> dict[str, Any]:
        """Values of a model card's commands: vLLM's `method`, drafted tokens, and options of SGLang."""
        flags = "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
        return {"method": config.kind, "length": 4, "flags": flags}

    # -- in rollouts of other engines -------------------------------------------------------------------------

    def rollout_problem(self, config: ConfigT, engine: Format) -> str | None:
        """As `engine_problem`, of a rollout, whose vLLM has classes of its own for drafters."""
        return self.engine_problem(config, engine)

    def vllm_method(self, config: ConfigT) -> str:
        """The name of its proposer."""
        return config.kind

    def vllm_files(self, config: ConfigT, weights: Mapping[str, Tensor], dtype: torch.dtype) -> ExportFiles:
        """The files that a rollout's engine reads at its start, where there is no `rollout_problem`."""
        return self.engine_files(config, weights, "vllm", dtype)

    def cached_layers(self, config: ConfigT) -> int:
        """Layers of which it caches keys and values."""
        return 1

    def draft_length(self, config: ConfigT) -> int | None:
        """Tokens of every draft; None: as many as it is asked for."""
        return None


def cast_tensors(named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous CPU copies; integers keep their type. Raises CheckpointError for a value that is not finite."""
    out = {}
    for name, tensor in named.items():
        stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        if not bool(torch.isfinite(stored).all()):
            raise CheckpointError(f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}")
        out[name] = stored.contiguous().clone()
    return out

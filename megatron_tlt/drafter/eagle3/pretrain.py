"""The warm-up of a drafter of kind eagle3: the same answers, read by a decoder that also returns three layers' outputs.

It is for serving elsewhere (`tools/export_drafter.py`): the rollouts here run drafters of kind eagle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tlt.drafter.batching import DraftSequence
from megatron_tlt.drafter.eagle3.trainer import Eagle3Trainer
from megatron_tlt.drafter.export.eagle import Origin
from megatron_tlt.drafter.export.eagle3 import export_eagle3, load_eagle3
from megatron_tlt.drafter.export.files import read_about, refuse_existing, write_export
from megatron_tlt.drafter.pretrain import DrafterWarmUp, average_gradients
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.base import DTYPES
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle.eagle3 import Eagle3Config, Eagle3Model, choose_vocabulary
from megatron_tlt.models.eagle.eagle3_features import FeatureDecoder
from megatron_tlt.models.loader import iter_weights

if TYPE_CHECKING:
    from megatron_tlt.backends.embedded import EmbeddedBackend
    from megatron_tlt.config.root import Config
    from megatron_tlt.distributed.world import World
    from megatron_tlt.models.base import Decoder
    from megatron_tlt.types import SamplingParams


class Eagle3WarmUp(DrafterWarmUp):
    """Every rank holds a second copy of the policy in PyTorch: the native decoder keeps no layer's output."""

    model: Eagle3Model

    def __init__(
        self,
        config: Config,
        world: World,
        backend: EmbeddedBackend,
        params: SamplingParams,
        shape: Eagle3Config,
    ):
        """Raises ConfigError for a drafter of another policy than the config's, and under rollout.tp > 1."""
        if config.rollout.tp > 1:
            allowed = "a drafter of kind eagle3 learns from a whole policy on every rank: must be 1"
            raise ConfigError.of("rollout.tp", config.rollout.tp, allowed)
        policy = ModelConfig.from_hf(config.model.path)
        if shape.policy != policy:
            raise ConfigError.of(
                "model.path", config.model.path, "is not the policy that the drafter was made for"
            )
        self.shape = shape
        self._seed: int | None = None
        super().__init__(config, world, backend, params)
        self._reader = FeatureDecoder(policy, self.shape.layers, world.device, DTYPES[config.rollout.dtype])
        self._reader.load_weights(iter_weights(config.model.path, policy))

    def _new_model(self) -> Eagle3Model:
        return Eagle3Model(self.shape)

    def start(self, drafter: Path | None, seed: int) -> None:
        """See the base class. Fresh weights are drawn when the answers are there: a reduced vocabulary is theirs."""
        if drafter is None:
            self._seed = seed
            return
        _, weights, origin = load_eagle3(drafter, read_about(drafter))
        self.model.load_full(weights)
        self.trained_steps = origin.trained_steps

    def _trainer(self, data: Sequence[DraftSequence]) -> Eagle3Trainer:
        if self._seed is not None:
            self.model.initialise(self._seed, self._head, self._vocabulary(data))
        average = average_gradients if self._world.size > 1 else None
        section, temperature = self._config.drafter, self._params.temperature
        return Eagle3Trainer(self.model, self._embed, self._head, section, temperature, average)

    def _vocabulary(self, data: Sequence[DraftSequence]) -> torch.Tensor | None:
        """The most frequent answer tokens of all ranks; None for the whole vocabulary."""
        if not self.shape.reduced:
            return None
        counts = torch.zeros(self.shape.policy.vocab_size, dtype=torch.int64)
        for s in data:
            counts += torch.bincount(s.token_ids[s.answer_start :], minlength=len(counts))
        total = torch.stack(self._world.all_gather_object(counts)).sum(0)
        chosen = choose_vocabulary(total, self.shape.draft_vocab_size)
        share = float(total[chosen].sum() / total.sum())
        self._say(f"drafts {len(chosen)} of {len(total)} tokens: {share:.2%} of the answers' tokens")
        return chosen

    def _policy(self) -> Decoder:
        return self._reader

    def _write(self, out: Path) -> None:
        refuse_existing(out)
        origin = Origin(self._backend.policy_version, self.trained_steps)
        dtype = DTYPES[self._config.drafter.save_dtype]
        write_export(out, export_eagle3(self.shape, self.model.state_dict(), "hf", dtype, origin))

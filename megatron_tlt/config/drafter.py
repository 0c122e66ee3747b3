"""Training of the drafter: before RL on responses of the starting policy, and online during RL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatron_tlt.config.base import FilePath, Section
from megatron_tlt.config.drafter_kinds import DrafterFacts

Arithmetic = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Sizes that depend on the device on which a drafter is trained."""

    dtype: Arithmetic
    micro_step_tokens: int
    buffer_mib: float


# The values of "auto". A GPU needs thousands of tokens to be busy, and its buffer is the host's memory.
AUTO = {"cpu": DeviceSizes("fp32", 192, 64.0), "cuda": DeviceSizes("bf16", 4096, 4096.0)}


class OnlineSection(Section):
    """Training of the drafter during RL, by ranks that wait for slower ones. Loss, max_sequence_tokens and type of
    the arithmetic are those of `drafter`."""

    lr: PositiveFloat = 1e-3
    """Learning rate after warm-up of an already trained drafter with a hidden size of at most 128; wider ones divide
    it by hidden size / 128 (Yang et al., arXiv 2203.03466, for Adam). It stays constant after ten steps of warm-up,
    because the policy keeps changing. Engines draft with a running mean of some 100 micro-steps."""
    start_lr: PositiveFloat = 1e-2
    """Learning rate of an untrained drafter (no rollout.speculation.drafter_path), by hidden size as lr. The rate of a
    micro-step is lr + (start_lr - lr) (1 - a). a is the overlap of drafter and policy (1 - TV, 0 to 1) at the first
    drafted position."""
    draft_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=16)] = "auto"
    """Positions drafted in a row in training. A micro-step with 1 takes a third of the time of one with 3. A trained
    eagle drafter keeps its acceptance with 1. An eagle3 drafter needs training at every position that it drafts. A
    dspark drafter is always trained at all positions of its block, of which so many are in the metrics. auto: 1 for
    eagle, 3 for eagle3, 8 for dspark."""
    micro_step_tokens: Literal["auto"] | Annotated[int, Field(ge=16)] = "auto"
    """Token budget of one micro-step of one rank, padding included; a rank can stop training between two micro-steps.
    Longer responses are cut into parts of so many tokens. auto: 192 on CPU, 4096 on CUDA."""
    buffer_mib: Literal["auto"] | PositiveFloat = "auto"
    """Host memory of one rank for hidden states and tokens to train on, in MiB. auto: 64 on CPU, 4096 on CUDA."""
    hidden_states: Literal["auto", "engine", "actor"] = "auto"
    """Who hands out the hidden states to train on. engine: the rollout engine, of every response, in the step itself.
    actor: the update's own forward (or the one that scores responses), of responses that have a gradient; windows train
    on those of the step before, none in the first step and in the first after a resume. auto: the engine where it
    can."""
    share_mib: NonNegativeFloat = 16.0
    """MiB of their longest responses that replicas send each other after a merge, in all, never more than buffer_mib: a
    replica that waits had short responses, and drafts matter most for long ones. Up to four replicas send at a
    time, in turns; of a response that does not fit, the end is sent. 0: each replica trains on its own responses only.
    Not with the actor's hidden states, which all ranks of a replica share out."""
    merge_share: NonNegativeFloat = 0.2
    """Most time of a merge of the ranks' drafters and of share_mib, as a share of the time that a rank has trained
    since the last one, on average. A merge that would take more is put off to a later step, unless a checkpoint is
    due. The engines get a new drafter at a merge."""
    fp8: Literal["off", "te"] = "off"
    """Arithmetic of the layer's linears in training. te: Transformer Engine, on a GPU that it has FP8 for; an error
    where it is not installed."""


class DrafterSection(Section):
    """Training of the drafter that rollout.speculation names, before RL (`megatron-tlt drafter`) and during RL."""

    num_prompts: PositiveInt = 512
    """Training prompts of which responses are generated before training."""
    responses_path: Annotated[str | None, FilePath()] = None
    """Responses to train on in place of generating: a JSONL file with prompts and responses, or the directory of a run
    with `observe.save_responses`. Of more than num_prompts x samples_per_prompt the last ones are taken. A prompt is
    in the column data.train.prompt_field, or as a list of ids in prompt_token_ids; a response in response, or in
    token_ids; or both are in messages, as in `sft.train_path`."""
    samples_per_prompt: PositiveInt = 4
    """Responses to each of them."""
    eval_prompts: PositiveInt = 128
    """Held-out prompts that acceptance is measured on."""
    num_steps: PositiveInt = 3000
    """Optimizer steps."""
    draft_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=16)] = "auto"
    """Positions that are drafted in a row in training. auto: as in drafter.online.draft_steps."""
    eval_steps: int = Field(default=8, ge=1, le=32)
    """Positions that are drafted in a row when acceptance is measured."""
    batch_tokens: Literal["auto"] | PositiveInt = "auto"
    """Token budget of one optimizer step of one rank, padding included; a longer response is a step of its own. auto:
    as in drafter.online.micro_step_tokens."""
    max_sequence_tokens: int = Field(default=2048, ge=16)
    """Longer responses are cut into parts of so many tokens for training."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, after 20 steps of warm-up; a cosine then ends at 0 after num_steps. Of a policy with a hidden
    size above 576, lr * 576 / hidden size."""
    hidden_weight: NonNegativeFloat = 10.0
    """Weight of the distance to the policy's hidden states in the loss (SmoothL1; kind eagle), beside 0.1 of the cross
    entropy with the policy's distribution and 0.9 of the total variation."""
    dtype: Literal["auto"] | Arithmetic = "auto"
    """Type of the arithmetic; during RL of the weights that it uses, too. Optimizer, mean and the weights that are
    stepped are fp32. auto: fp32 on CPU, bf16 on CUDA."""
    eval_every: PositiveInt = 500
    """Optimizer steps between measurements."""
    online: OnlineSection = OnlineSection()
    """Training during RL."""

    def online_draft_steps(self, kind: DrafterFacts) -> int:
        """`online.draft_steps`, or the value of auto with a drafter of this kind."""
        return kind.draft_steps(self.online.draft_steps)

    def drafted(self, kind: DrafterFacts) -> int:
        """`draft_steps`, or the value of auto with a drafter of this kind."""
        return kind.draft_steps(self.draft_steps)

    def step_tokens(self, device: str) -> int:
        """`batch_tokens`, or the value of auto on a device of this type."""
        auto = AUTO["cuda" if device == "cuda" else "cpu"].micro_step_tokens
        return auto if self.batch_tokens == "auto" else self.batch_tokens

    def sizes(self, device: str) -> DeviceSizes:
        """The settings with a value for "auto" on a device of this type ("cpu", "cuda")."""
        auto, online = AUTO["cuda" if device == "cuda" else "cpu"], self.online
        return DeviceSizes(
            auto.dtype if self.dtype == "auto" else self.dtype,
            auto.micro_step_tokens if online.micro_step_tokens == "auto" else online.micro_step_tokens,
            auto.buffer_mib if online.buffer_mib == "auto" else online.buffer_mib,
        )

"""How advantages and the policy loss are computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_tlt.config.base import OnDisk, Section
from megatron_tlt.config.model import ArchitectureConfig

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "distill"]


class AlgorithmSection(Section):
    """The policy-gradient algorithm. Defaults marked "of the algorithm" come from its paper."""

    name: AlgorithmName = "grpo"
    """grpo (2402.03300), dr_grpo (2503.20783), dapo (2503.14476), rloo (2402.14740),
    reinforce_pp (2501.03262), gspo (2507.18071), distill (2306.13649: reverse KL to a teacher at each token, alone or
    beside rewards)."""
    teacher: Annotated[str | None, OnDisk("model")] = None
    """distill: Hugging Face directory of the teacher, or its name on the hub, as `model.path`. Its sizes may differ
    from the policy's; its tokenizer must give every token of the policy's the same id."""
    ratio_clip_low: NonNegativeFloat | None = None
    """Lower clip: ratio >= 1 - low. Default: of the algorithm."""
    ratio_clip_high: NonNegativeFloat | None = None
    """Upper clip: ratio <= 1 + high. Default: of the algorithm."""
    kl_coef: NonNegativeFloat | None = None
    """Weight of the KL to the frozen reference policy; 0, the default, keeps no reference. distill: of the KL to the
    teacher, default 1; the advantages of rewards have weight 1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss. k1 has no gradient there on average: a warning. No effect with distill, nor with
    kl_in: reward, which takes k1."""
    entropy_coef: float = 0.0
    """Bonus on the token entropy."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per RL step; with more than 1 the later ones are off-policy and clipped. Each has
    train.prompts_per_step / mini_batches prompts: a step of fewer prompts (dynamic_sampling, rollout.carry_over) has
    fewer optimizer steps, at its end a smaller one."""
    importance_cap: NonNegativeFloat = 2.0
    """Cap of the truncated importance correction for the engine/actor log-prob mismatch, and for tokens that earlier
    policies drew (rollout.carry_over); 0: off. No effect with TensorRT-LLM and vLLM, which give no log-probs."""
    dynamic_sampling: bool = False
    """DAPO: drop groups whose rewards, before overlong shaping, are all equal and roll out more prompts instead."""
    max_sampling_rounds: PositiveInt = 4
    """Most rollout rounds of one step with dynamic sampling, the first one included. No effect without it."""
    overlong_buffer: NonNegativeInt = 0
    """DAPO overlong shaping: tokens before max_tokens over which a penalty on the reward grows from 0 to 1; 0: off."""
    mask_truncated: bool = False
    """Leave responses cut off at max_tokens out of the loss (DAPO's overlong filtering), and trajectories that another
    limit has cut (max_turns, or max_turn_tokens in the last turn, or the environment's own)."""
    mask_off_policy: bool = False
    """Leave tokens that earlier policies drew (rollout.carry_over) out of the loss, in place of an importance ratio;
    lengths and divisors count them."""
    advantage_eps: PositiveFloat = Field(default=1e-6)
    """Added to standard deviations."""

    # The teacher's shape, for the memory plan and the layout; None: there is none here that can be read.
    _teacher_shape: ArchitectureConfig | None = None

    @property
    def teacher_shape(self) -> ArchitectureConfig | None:
        """The shape that `with_teacher_shape` has set."""
        return self._teacher_shape

    def with_teacher_shape(self, shape: ArchitectureConfig) -> AlgorithmSection:
        """A copy that knows the teacher's shape."""
        copied = self.model_copy()
        copied._teacher_shape = shape
        return copied

    @property
    def kl_weight(self) -> float:
        """`kl_coef` with its default: above 0 a frozen model is scored beside the policy."""
        if self.kl_coef is not None:
            return self.kl_coef
        return 1.0 if self.name == "distill" else 0.0

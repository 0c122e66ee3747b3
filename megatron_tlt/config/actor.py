"""The Megatron-core policy: layout, precision, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_tlt.config.base import OnDisk, Section
from megatron_tlt.config.lr_schedule import LearningRate, Schedule

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
MLP_TARGETS = LORA_TARGETS[4:]
ADAM_EPS = 1e-8  # added to the root of Adam's second moment, as in PyTorch


class LoraSection(Section):
    """Low-rank adapters: the policy's matrices stay as they are, and each target W acts as W + alpha / rank * B A, of
    which A and B are trained. Router, embeddings, norms and LM head stay."""

    rank: PositiveInt = 32
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the product, times rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = LORA_TARGETS
    """Matrices of every layer that get a pair; of a mixture of experts gate, up and down of each expert, the shared one
    included."""
    adapter_path: Annotated[str | None, OnDisk()] = None
    """PEFT directory (adapter_config.json, adapter_model.safetensors) that the pairs start from; default: B is zero, A
    is drawn. Its rank, alpha and targets must be those of this section."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @property
    def record(self) -> str:
        """What two runs must agree in to load each other's checkpoints."""
        return f"rank {self.rank}, alpha {self.alpha:g}, {' '.join(t for t in LORA_TARGETS if t in self.targets)}"


class ActorSection(Section):
    """Parallel layout and precision of the policy update. Data parallel size = ranks / (tp * pp * cp)."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size."""
    cp: PositiveInt = 1
    """Context parallel size: so many ranks divide the rows of every sequence, and with them the activations. For
    sequences that one GPU cannot hold."""
    ep: PositiveInt = 1
    """Expert parallel size of a mixture of experts: every rank holds 1/ep of each layer's experts, and tokens travel to
    them. Its ranks are taken from tp x cp x dp."""
    load_balancing_loss: NonNegativeFloat = 0.0
    """Coefficient of the routers' load-balancing loss (Switch Transformer; 1 in each layer when balanced), added to the
    objective; 0: off, which is usual in RL. A checkpoint's own coefficient is not used."""
    router_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the routers' z-loss, the mean squared log-sum-exp of their logits; 0: off."""
    router_replay: Literal["off", "rollout"] = "off"
    """rollout: the update takes the experts that the rollout engine chose for each token (R3), where it recorded them
    (embedded, vllm); off: its own router chooses."""
    sequence_parallel: bool = False
    """Shard activations of norms and residuals along the sequence over the TP ranks (needs tp > 1)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Parameter and activation type. bf16 keeps fp32 master weights and reduces gradients in fp32."""
    micro_batch_tokens: PositiveInt = 4096
    """Token budget of one packed micro-batch; a longer sequence gets a micro-batch of its own."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: selective redoes `recompute_modules`, full redoes whole layers."""
    recompute_modules: Annotated[tuple[Literal["layernorm", "mlp_act", "mlp"], ...], Field(min_length=1)] = (
        "layernorm",
        "mlp_act",
    )
    """Modules that selective recompute computes again: norms (of Transformer Engine's layers) and the MLP's activation
    cost elementwise passes, the MLP most of a forward pass."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Communicate gradients of data-parallel replicas during backward, and, with the distributed optimizer, weights
    during the next forward. auto: on with CUDA."""
    distributed_optimizer: Literal["auto", "on", "off"] = "auto"
    """Shard optimizer state over data parallel ranks (ZeRO-1). auto: on with CUDA and Adam, else off."""
    offload_optimizer: bool = False
    """Keep optimizer state in (pinned) host memory, and no gradient buffers at all, except while the policy is updated
    or saved. Changes no bit of the result."""
    lora: LoraSection | None = None
    """Train low-rank adapters in place of the weights; null: train the weights. Adapted layers are megatron's own with
    any `layer_spec`."""
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers to build: megatron's local ones or Transformer Engine's. auto: TE where it is installed and has attention
    over packed rows: in bf16 on GPUs of compute capability 9.x (H100), and 10.x unless train.deterministic."""

    @property
    def has_router_losses(self) -> bool:
        """Whether routers have losses of their own, which every token of the update takes part in."""
        return bool(self.load_balancing_loss or self.router_z_loss)

    def shards_optimizer(self, optimizer: OptimizerSection, cuda: bool) -> bool:
        """Whether optimizer state is sharded over data parallel ranks. On CPU the plain optimizers save, load and
        reshard with no workaround; the sharded one needs some (see `actor/optimizer_shards.py`).
        """
        if self.distributed_optimizer == "auto":
            return cuda and optimizer.name == "adam"
        return self.distributed_optimizer == "on"

    @staticmethod
    def cp_comm(engine: bool) -> Literal["p2p", "all_gather"]:
        """The form of context parallel attention: Transformer Engine's layers (`engine`) pass keys and values around
        while attention runs, megatron's local ones gather them.
        """
        return "p2p" if engine else "all_gather"


class OptimizerSection(Section):
    """Optimizer, schedule and clipping."""

    name: Literal["adam", "sgd"] = "adam"
    """adam is AdamW."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate. The default is RL's: fine-tuning takes about 1e-5, adapters ten times as much."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of a decaying schedule."""
    schedule: Schedule = "constant"
    """Shape after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay (not on norms and biases)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm to clip to; 0: off."""

    @property
    def rate(self) -> LearningRate:
        """The learning rate by step."""
        return LearningRate(self.lr, self.warmup_steps, self.schedule, self.min_lr)

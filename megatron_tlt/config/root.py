"""The roots: `Config` of an RL run, `SftConfig` of supervised fine-tuning, and what they share, `TrainingConfig`."""

from __future__ import annotations

from abc import abstractmethod
from datetime import date
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_tlt.config.actor import ActorSection, OptimizerSection
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.base import FilePath, OnDisk, OpenMapping, Section
from megatron_tlt.config.data import DataSection, RewardSection
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.drafter_kinds import TRAINED_ONLY
from megatron_tlt.config.env import EnvSection
from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.model import ArchitectureConfig, ModelSection
from megatron_tlt.config.rollout import RolloutSection, SyncSection
from megatron_tlt.config.run import (
    UNFINISHED,
    CheckpointSection,
    ClusterSection,
    DistributedSection,
    EvalSection,
    ObserveSection,
    RolloutCacheSection,
    SftCheckpointSection,
    ShutdownSection,
    TrainSection,
    WatchdogSection,
)
from megatron_tlt.interfaces import CAPABILITIES


class TrainingConfig(Section):
    """What every training has. What differs is asked by name, of the properties below."""

    model: ModelSection
    """The model to train."""
    actor: ActorSection = ActorSection()
    """The Megatron-core policy."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints."""
    stop: ShutdownSection = ShutdownSection()
    """Signals."""
    distributed: DistributedSection = DistributedSection()
    """The world."""
    cluster: ClusterSection = ClusterSection()
    """The machines."""

    chat_name: ClassVar[str]
    """The section with the chat template's settings."""

    @property
    def chat(self) -> DataSection | SftSection:
        """The section `chat_name`."""
        section: DataSection | SftSection = getattr(self, self.chat_name)
        return section

    @property
    @abstractmethod
    def state_dir(self) -> Path:
        """The directory from which an interrupted run goes on."""

    @property
    def recorded_in(self) -> list[Path]:
        """Directories whose config.json may record the run that goes on, the run's own first; none for a new run."""
        resume = self.checkpoint.resume
        if resume == "never":
            return []
        branched = [] if resume == "auto" else [Path(resume).absolute().parent.parent]  # RUN/checkpoints/STEP
        return [self.state_dir, *branched]

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def longest_trained(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        return self.model.max_context

    @property
    def reads_weights(self) -> bool:
        """Whether the weights in `model.path` are read, beside its config.json and tokenizer."""
        return self.model.megatron_path is None

    @property
    def rl(self) -> Config | None:
        """This configuration if it has rollouts, with the sections of RL; None in fine-tuning."""
        return None

    @property
    def records(self) -> SftSection | None:
        """The section of the records to train on; None in RL."""
        return None

    def frozen_shape(self, shape: ArchitectureConfig) -> ArchitectureConfig | None:
        """The shape of the frozen model that is kept beside the policy of `shape`: its copy (`shape` itself) or a
        teacher. None: there is no such model, or the teacher's shape is unknown.
        """
        return None


class Config(TrainingConfig):
    """An RL run (`megatron-tlt train`)."""

    rollout: RolloutSection = RolloutSection()
    """The rollout engine."""
    sync: SyncSection = SyncSection()
    """Weight syncs."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The RL algorithm."""
    data: DataSection = DataSection()
    """Prompts."""
    rewards: RewardSection = RewardSection()
    """Rewards."""
    env: EnvSection | None = None
    """Multi-turn rollouts; none: one response to each prompt."""
    drafter: DrafterSection = DrafterSection()
    """Training of the drafter."""
    idle: IdleSection = IdleSection()
    """Idle ranks."""
    train: TrainSection = TrainSection()
    """The run."""
    eval: EvalSection = EvalSection()
    """Evaluation."""
    rollout_cache: RolloutCacheSection = RolloutCacheSection()
    """Finished responses of steps that no checkpoint covers yet."""
    observe: ObserveSection = ObserveSection()
    """Logs and progress."""
    watchdog: WatchdogSection = WatchdogSection()
    """Watching the ranks."""

    chat_name = "data"

    @property
    def trains(self) -> bool:
        """Whether the policy is updated; in what `trainer.preflight.without_training` makes it is not."""
        return self.train.num_steps > 0

    @property
    def state_dir(self) -> Path:
        return Path(self.train.run_dir)

    @property
    def optimizer_steps(self) -> int:
        return self.train.num_steps * self.algorithm.mini_batches

    @property
    def longest_trained(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together that an engine holds, training or evaluation."""
        return max(self.longest_trained, self.data.max_prompt_tokens + (self.eval.max_tokens or 0))

    @property
    def reads_weights(self) -> bool:
        """Whether the weights in `model.path` are read: by the policy, or by TensorRT-LLM, which starts with them."""
        return super().reads_weights or self.rollout.backend == "trtllm"

    @property
    def rl(self) -> Config:
        return self

    def frozen_shape(self, shape: ArchitectureConfig) -> ArchitectureConfig | None:
        if self.algorithm.kl_weight == 0:
            return None
        if self.algorithm.teacher is not None:
            return self.algorithm.teacher_shape
        return shape if self.actor.lora is None else None

    @property
    def hidden_states_of(self) -> Literal["engine", "actor"]:
        """Who hands out the hidden states that the drafter trains on."""
        chosen = self.drafter.online.hidden_states
        if chosen != "auto":
            return chosen
        return "engine" if CAPABILITIES[self.rollout.backend].hidden_states else "actor"

    def by_handles(self, device: str) -> bool:
        """Whether an engine gets weights by handles of GPU memory, on a device of this type."""
        return self.rollout.engine_process is not None and self.sync.by_handles(device)

    @property
    def hang_s(self) -> float:
        """`watchdog.hang_s` with its default."""
        hang_s = self.watchdog.hang_s
        return 3 * self.distributed.timeout_s if hang_s is None else hang_s


def without_tlt(config: Config) -> Config:
    """The run that TLT is compared with, which configs/tlt-off.yaml makes: no drafts, no training of a drafter."""
    unread: dict[str, object] = dict.fromkeys(TRAINED_ONLY)
    speculation = config.rollout.speculation.model_copy(update={"drafter": "none", **unread})
    rollout = config.rollout.model_copy(update={"speculation": speculation})
    idle = config.idle.model_copy(update={"train_drafter": False, "pre_rollout": False})
    return config.model_copy(update={"rollout": rollout, "idle": idle})


class SftSection(Section):
    """Supervised fine-tuning: records, length, output."""

    train_path: Annotated[str, OnDisk("rows", split="train_split")]
    """JSONL of {"prompt", "completion"} or {"messages"} records (chat messages, the last one of the assistant), or a
    data set: a directory or a name on the Hugging Face hub, as with `data.train.path` and kind: hf. Of messages, those
    of the assistant after the last one of the user are trained on; between them may be a tool's. Calls stand in the
    content as the model writes them; a column tools may have the JSON schemas for the chat template. Records of more
    than `model.max_context` tokens are left out, and counted at the start."""
    eval_path: Annotated[str | None, OnDisk("rows", split="eval_split")] = None
    """Held-out records; their loss is reported."""
    subset: str | None = None
    """Subset of a data set."""
    train_split: str = "train"
    """Split of a data set in train_path."""
    eval_split: str = "test"
    """Split of a data set in eval_path."""
    prompt_field: str = "prompt"
    """Column of the prompt: a string, or chat messages of which the last one is not the assistant's. messages: the
    column has the whole conversation where a row has no completion."""
    completion_field: str = "completion"
    """Column of the completion: a string, or the messages behind a prompt of messages. Records without text in it are
    left out, and counted at the start."""
    out: Annotated[str, FilePath()]
    """Hugging Face directory to write at the end, on a disk that all hosts share; `losses.jsonl` in it has a row a
    step."""
    num_steps: PositiveInt = 1000
    """Optimizer steps."""
    tokens_per_step: PositiveInt = 8192
    """Tokens of one optimizer step, over all ranks."""
    eval_every: PositiveInt = 100
    """Steps between evaluations."""
    max_lost_steps: NonNegativeInt = 3
    """Steps in a row with an update that is not finite after which the training ends, before `out` is written; each is
    skipped, its batch kept in out/unfinished/nonfinite. 0: never."""
    chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template if it has one."""
    chat_template_kwargs: OpenMapping = Field(default_factory=dict)
    """Variables of the chat template, for example {enable_thinking: false}, or reasoning_effort, date_string: whatever
    it reads."""
    chat_template_date: date | None = None
    """Date, YYYY-MM-DD, for chat templates that show today's. Default: the day on which the run began,
    also when it goes on."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data order, and of new adapters."""

    @property
    def files(self) -> list[tuple[str, str, str]]:
        """(field, path, split) of the records that there are."""
        named = ("train", self.train_path, self.train_split), ("eval", self.eval_path, self.eval_split)
        return [(f"sft.{name}_path", path, split) for name, path, split in named if path is not None]


class SftConfig(TrainingConfig):
    """A supervised fine-tuning run (`megatron-tlt sft`)."""

    sft: SftSection
    """Data and length."""
    checkpoint: SftCheckpointSection = SftCheckpointSection()
    """Checkpoints."""

    chat_name = "sft"

    @property
    def state_dir(self) -> Path:
        return Path(self.sft.out) / UNFINISHED

    @property
    def optimizer_steps(self) -> int:
        return self.sft.num_steps

    @property
    def records(self) -> SftSection:
        return self.sft

"""The run: length, evaluation, checkpoints, signals and restarts, observation, cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_tlt.config.base import FilePath, OnDisk, Section


class TrainSection(Section):
    """Length and seed of the run."""

    num_steps: PositiveInt = 100
    """RL steps."""
    prompts_per_step: PositiveInt = 64
    """Prompts in one step, over all ranks."""
    seed: NonNegativeInt = 0
    """Seed of sampling, data order and initialisation."""
    run_dir: Annotated[str, FilePath()] = "runs/default"
    """Where checkpoints, logs and events go; of several hosts a disk that all of them share."""
    max_lost_steps: NonNegativeInt = 3
    """Steps in a row after which the run ends, of updates that are not finite (each is skipped, its batch kept in
    run_dir/nonfinite), or without an update, since no response was trained on (dynamic sampling kept no group,
    `algorithm.mask_truncated` left out all); 0: never."""
    deterministic: Literal["auto"] | bool = "auto"
    """Fix the order of every reduction: a resumed run equals an uninterrupted one bit for bit (fp32). auto: true on
    CPU; false on CUDA, where PyTorch's deterministic forms are slower ones. true: an operation of the update that has
    none ends the run by its name."""

    def is_deterministic(self, device: str) -> bool:
        """`deterministic` on a device of this type."""
        return device == "cpu" if self.deterministic == "auto" else self.deterministic


class EvalSection(Section):
    """Evaluation on held-out prompts."""

    every: NonNegativeInt = 10
    """Steps between evaluations, also before the first and after the last step; 0: never."""
    num_prompts: PositiveInt = 64
    """Held-out prompts, always the same ones; of a file with fewer, all."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each row; pass@k is estimated for every power of two up to the responses to one prompt. Rows that
    repeat prompt and answer, as some files do to average over responses, are one prompt there and in the standard
    error."""
    temperature: NonNegativeFloat = 1.0
    """Temperature of evaluation."""
    top_k: NonNegativeInt | None = None
    """Keep the k most likely tokens; default: rollout.top_k."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass; default: rollout.top_p."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Drop tokens below min_p times the most likely one's probability; default: rollout.min_p."""
    max_tokens: PositiveInt | None = None
    """Longest response; default: rollout.max_tokens."""


UNFINISHED = "unfinished"  # folder of a command's output directory: what the command resumes from until it is done


Resume = Annotated[Literal["auto", "never"] | str, OnDisk(words=("auto", "never"))]


class CheckpointSection(Section):
    """Checkpoints in megatron's distributed format."""

    every: NonNegativeInt = 20
    """Steps between checkpoints, also after the last step; 0: only then and at a signal."""
    keep: PositiveInt = 3
    """Newest checkpoints kept."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    resume: Resume = "auto"
    """auto: from `latest` in run_dir when there is one; never; or the path of one checkpoint."""


class SftCheckpointSection(CheckpointSection):
    """Checkpoints of fine-tuning, whose steps are short: in `unfinished` of the directory `sft.out` until that is
    written."""

    every: NonNegativeInt = 200
    """Steps between checkpoints, also after the last step; 0: only then and at a signal."""
    keep: PositiveInt = 1
    """Newest checkpoints kept."""
    resume: Resume = "auto"
    """auto: from the newest of an unfinished run when there is one; never, which alone replaces a finished `sft.out`;
    or the path of one checkpoint. One of another model or adapter, of other records or of another order of them is
    refused."""


class ShutdownSection(Section):
    """SIGUSR1 (a warning), SIGTERM and Ctrl-C: the step is finished or dropped, a checkpoint written, exit code 75."""

    warning_s: PositiveFloat = 150.0
    """Seconds from SIGUSR1 until every rank must be gone; less than the lead time of `sbatch --signal`."""
    term_s: PositiveFloat = 20.0
    """Seconds from SIGTERM or Ctrl-C until every rank must be gone; less than the site's KillWait (30 by default)."""
    save_s: NonNegativeFloat = 10.0
    """Seconds to allow for the checkpoint, or as many as the newest one of this start took, if these are more: a step
    that would leave less is dropped."""


ROLLOUT_CACHE_BYTES = 4 << 30  # on the disk, of one replica of a run; responses beyond them are not kept


class RolloutCacheSection(Section):
    """Finished responses in run_dir/rollout_cache, until a checkpoint covers their step. With keyed sampling a resumed
    run would generate the same responses again, so it reads them instead. Those of `eval --out OUT` are in
    OUT.unfinished until OUT is written."""

    enabled: bool = True
    """Keep finished responses and reuse them after a restart. Rollouts without keyed sampling (backend:
    trtllm) do not, with one warning."""


class DistributedSection(Section):
    """The world."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU that CUDA_VISIBLE_DEVICES does not hide; each rank needs one of its own. cpu:
    GPUs are hidden from the run."""
    timeout_s: PositiveFloat = 600.0
    """A collective that takes longer ends the job, naming the phase and the ranks that did not arrive. On CUDA NCCL's
    only log that, and errors of NCCL: `train` leaves both to `watchdog.hang_s` (to PyTorch with
    TORCH_NCCL_ASYNC_ERROR_HANDLING=3 in the environment), other commands end by PyTorch's SIGABRT."""


class ObserveSection(Section):
    """Files, displays and services for a run's figures."""

    tensorboard: bool = True
    """Write TensorBoard event files under run_dir/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project: metrics, and the rows of samples.jsonl as a table."""
    samples_per_step: NonNegativeInt = 2
    """Sample rollouts written to run_dir/samples.jsonl each step, with their drafts and turns; 0: none."""
    save_responses: bool = False
    """Write every response of training, text and token ids, to run_dir/responses, for `drafter.responses_path`: some
    ten bytes a token."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """A line a step (none: nothing). rich: and a live line of the rollout under them; auto: that, on a terminal."""


class WatchdogSection(Section):
    """Heartbeats, and the end of a run without them (docs/guides/on_call.md, "Status, hangs and stacks")."""

    hang_s: NonNegativeFloat | None = None
    """A rank that shows no sign of life for so many seconds ends the job, with the stacks of all ranks in
    run_dir/stacks; 0: never. Longer than the longest micro-batch, checkpoint write and read of one weight or
    checkpoint file, and at least twice `distributed.timeout_s`: a rank that waits in a collective shows no sign of
    life either. Default: three times that."""


class ClusterSection(Section):
    """The machines this config is meant for; used by `check` when not inside a job."""

    nodes: PositiveInt = 1
    """Nodes."""
    ranks_per_node: PositiveInt = 1
    """Ranks of one node (GPUs, or CPU processes)."""
    memory_gib: PositiveFloat | None = None
    """Memory of one rank's device, which the memory plan may fill: a config that needs more is refused. Default: on
    CUDA the GPU's memory, known in a run only."""
    reserve_gib: NonNegativeFloat = 2.0
    """Of `memory_gib`, on CUDA, the part that the plan leaves to memory outside PyTorch: the context, NCCL's
    communicators, workspaces of libraries, other processes. A run that finds more taken gets a smaller KV cache."""
    host_memory_gib: PositiveFloat | None = None
    """Memory of one node's host, where device is cuda: a config whose ranks need more there is refused. Default: 256
    GiB for each rank of a node, as nodes of 2 TiB with eight GPUs have; in a run the memory of the smallest node."""

    @property
    def host_gib(self) -> float:
        """`host_memory_gib` with its default."""
        return self.host_memory_gib or 256.0 * self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

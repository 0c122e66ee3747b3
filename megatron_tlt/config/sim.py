"""The cluster, the model and the workload of `megatron-tlt simulate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_tlt.config.base import FilePath, Section
from megatron_tlt.config.idle import IdleSection
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.rollout import RolloutSection

GpuName = Literal["h100", "h200", "a100", "b200", "rtx5090", "rtx4090", "rtx3090"]


class SimClusterSection(Section):
    """The machines."""

    nodes: PositiveInt = 1
    """Nodes."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node."""
    gpu: GpuName = "h100"
    """Data-sheet figures of the GPU."""
    memory_share: float = Field(default=0.85, gt=0, le=1)
    """Share of GPU memory that weights and KV cache of a rollout engine may take."""
    network_gbps: PositiveFloat = 400.0
    """Network of one GPU between nodes, in Gbit/s."""


class LengthSection(Section):
    """How long responses are. The generator of a step is seeded: every mode and node count gets the same responses."""

    median: PositiveFloat = 3500.0
    """Median tokens of a lognormal distribution; not read with `values` or `path`."""
    sigma: NonNegativeFloat = 1.0
    """Standard deviation of its logarithm."""
    prompt_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the logarithm's variance that is the prompt's: responses to one prompt are alike."""
    values: tuple[PositiveInt, ...] = ()
    """Lengths to draw from, instead of the lognormal distribution."""
    path: Annotated[str | None, FilePath()] = None
    """Where lengths to draw from are: a run's directory (median, 95th percentile and maximum of every step in its
    metrics.jsonl); or a text file with a length a line, or JSON lines with `tokens` or `token_ids`."""


class WorkloadSection(Section):
    """Prompts and responses of a step."""

    steps: PositiveInt = 5
    """RL steps to simulate."""
    prompts_per_step: PositiveInt = 128
    """Prompts of one step, over all replicas."""
    prompt_tokens: PositiveInt = 256
    """Tokens of a prompt."""
    lengths: LengthSection = LengthSection()
    """Responses."""
    seed: NonNegativeInt = 0
    """Seed of lengths and of acceptance."""


class AcceptanceSection(Section):
    """How often drafted tokens are accepted."""

    rates: tuple[float, ...] = ()
    """Chance that the token at each drafted position is the policy's, given that those before it were; the last holds
    for all further ones. Of a trained drafter: of one that is adapted to the policy."""
    stale_rates: tuple[float, ...] = ()
    """The same of a trained drafter that never saw this policy; default: `rates`."""
    coverage: float = Field(default=1.0, gt=0, le=1)
    """Share of requests and steps in which it proposes anything."""
    reach: float = Field(default=1.0, gt=0, le=1)
    """Chance that a proposal goes on behind each of its tokens: a suffix draft ends where its match ends."""
    spread: PositiveFloat = 2.0
    """Spread of its confidence: the chance of one token is drawn from a beta distribution of this concentration around
    the position's. Small: near 0 or 1; large: always the same."""


class SimDraftersSection(Section):
    """The drafters."""

    suffix: AcceptanceSection = AcceptanceSection(rates=(0.75, 0.8, 0.85), coverage=0.4)
    """Sibling and earlier responses."""
    trained: AcceptanceSection = AcceptanceSection(rates=(0.8,))
    """The trained drafter."""


class SimPreRolloutSection(Section):
    """How far a pre-rolled response is the next policy's, which draws with the same noise."""

    hazard: float = Field(default=0.001, ge=0, le=1)
    """Chance of each token up to the first mismatch to be that mismatch: the policy's drift in one update. Fitted to
    counts of a small model on short responses (docs/guides/simulator.md)."""
    found: float = Field(default=0.5, ge=0, le=1)
    """Chance of each token behind a mismatch that the place in the pre-rolled response is found again; 0: never."""
    found_hazard: float = Field(default=0.12, gt=0, le=1)
    """As `hazard`, of a place that was found again."""


class SimCostSection(Section):
    """Seconds of an engine step, by a roofline of model and GPU."""

    bandwidth_efficiency: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory bandwidth that weights and KV cache are read with."""
    compute_efficiency: float = Field(default=0.75, gt=0, le=1)
    """Share of the GPU's peak that large matrix products reach."""
    step_ms: NonNegativeFloat = 1.2
    """Milliseconds of every engine step beside the forward: scheduling, launch, sampling."""
    speculation_ms: NonNegativeFloat = 3.0
    """Milliseconds that a step with drafts adds: verification, the drafter's catch-up."""
    pass_ms: NonNegativeFloat = 0.25
    """Milliseconds of every pass of the trained drafter beside reading its weights."""
    lookup_us: NonNegativeFloat = 20.0
    """Microseconds of the suffix drafter for one request."""
    allreduce_us: NonNegativeFloat = 10.0
    """Latency of one all-reduce within a tensor-parallel engine; there are two in a layer."""


class SimTrainingSection(Section):
    """The phases beside the rollout, and the drafter's training."""

    mfu: float = Field(default=0.35, gt=0, le=1)
    """Share of the GPUs' peak that the update reaches: 6 operations a parameter and token, and attention's."""
    recompute: bool = True
    """Activations are computed again in the backward pass: 2 operations a parameter and token more, 8 in all."""
    lora: bool = False
    """Adapters are trained: the frozen weights have no gradients, which are 2 operations a parameter and token less."""
    logprob_passes: NonNegativeInt = 2
    """Forward passes of the policy over all responses before the update (old and reference policy)."""
    teacher: ArchitectureConfig | None = None
    """Shape of the teacher of a distillation: one more forward pass over all responses, of this model."""
    score_ms: NonNegativeFloat = 200.0
    """Rewards, exchange and logging of one step, and whatever else does not depend on its tokens."""
    micro_step_tokens: PositiveInt = 8192
    """Tokens of one micro-step of a replica."""
    draft_steps: Literal["auto"] | PositiveInt = "auto"
    """Positions that a micro-step drafts in a row, a pass through the drafter each (of dspark one for all), as
    drafter.online.draft_steps of a run."""
    drift: float = Field(default=0.08, ge=0, le=1)
    """Share of the drafter's adaptation that one policy update undoes."""
    tokens_to_adapt: PositiveFloat = 4e6
    """Drafter training tokens that close the gap to a fully adapted drafter to 1/e."""
    start_quality: float = Field(default=0.0, ge=0, le=1)
    """The drafter's adaptation at the first step: 0 is `stale_rates`, 1 is `rates`."""


class SimConfig(Section):
    """A simulated RL run (`megatron-tlt simulate`)."""

    name: str = "simulation"
    """Title of tables and report, which add the model's size and the GPU."""
    model: ArchitectureConfig
    """The policy's shape."""
    cluster: SimClusterSection = SimClusterSection()
    """The machines."""
    workload: WorkloadSection = WorkloadSection()
    """Prompts and responses."""
    rollout: RolloutSection = RolloutSection()
    """The engine, as in a run: tp, samples_per_prompt, max_tokens, kv_cache_mib, max_running_requests,
    max_batched_tokens, schedule and speculation are read. Steps are the embedded engine's in bf16, whatever it says."""
    idle: IdleSection = IdleSection()
    """Idle ranks, as in a run."""
    drafters: SimDraftersSection = SimDraftersSection()
    """Acceptance of each drafter."""
    pre_rollouts: SimPreRolloutSection = SimPreRolloutSection()
    """Acceptance of pre-rolled responses, where `idle.pre_rollout` is on."""
    costs: SimCostSection = SimCostSection()
    """Seconds of engine steps."""
    training: SimTrainingSection = SimTrainingSection()
    """Seconds of all other phases, and the drafter's training."""
    plain_above: PositiveInt | None = None
    """Running requests of a replica above which nothing is drafted, whatever the selector chooses: the threshold of
    engines that have one, TLT's among them. Default: the selector decides, as in a run."""

"""The report of `megatron-tlt check`: the rank grid, memory per rank, disk, tokens per step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.config.checks.layout import Device, resolve_device
from megatron_tlt.config.checks.pre_rollouts import NO_EVALUATIONS, why_no_eval_drafts, why_no_pre_rollouts
from megatron_tlt.config.dims import Dims
from megatron_tlt.config.drafter_kinds import BlockFacts
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.disk import disk_lines
from megatron_tlt.config.planning.memory import KV, RankMemory, estimate_memory, node_host_bytes
from megatron_tlt.config.planning.parameters import (
    GIB,
    adapter_parameters,
    kv_bytes_per_token,
    total_parameters,
)
from megatron_tlt.config.planning.policy import micro_batch_tokens
from megatron_tlt.config.root import Config, TrainingConfig, without_tlt
from megatron_tlt.errors import aligned
from megatron_tlt.interfaces import CAPABILITIES

MAX_GRID_ROWS = 16
_FEW = 4  # times the requests of full length that a cache holds: the running requests beyond which `check` warns


def render_check(
    config: TrainingConfig,
    shape: ArchitectureConfig | None,
    num_ranks: int,
    device: Device | None = None,
    all_rows: bool = False,
) -> str:
    """The report as plain text. `tp * pp * cp` must divide `num_ranks` (see `checks.run.find_problems`).

    Without a shape (no model directory, no `model.architecture`) the memory table is replaced by a note. `all_rows`:
    of the memory also those that round to 0.00 GiB.
    """
    shape = shape if shape is not None else config.model.architecture
    actor = config.actor
    dims = Dims.fit(num_ranks, tp=actor.tp, pp=actor.pp, cp=actor.cp, ep=actor.ep)
    parts = _grid(dims)
    if config.rl is not None:
        parts += _engines(config.rl, num_ranks)
    parts += _adapters(config, shape)
    parts += ["", *_memory(config, shape, num_ranks, device, all_rows), ""]
    parts += disk_lines(config, shape, num_ranks) if shape is not None else []
    if config.rl is not None:
        parts += _tokens(config.rl, dims)
    elif config.records is not None:
        parts.append(f"One step: {config.records.tokens_per_step} tokens in one optimizer step over {dims.dp} replicas")
    return "\n".join(parts) + "\n"


def _adapters(config: TrainingConfig, shape: ArchitectureConfig | None) -> list[str]:
    """The share of the model that adapters train."""
    lora = config.actor.lora
    if lora is None:
        return []
    lines = [f"Trained: adapters ({lora.record})"]
    if shape is not None:
        count = sum(adapter_parameters(shape, lora, Dims.fit(1, tp=1, pp=1), 0))
        lines.append(f"  {count:.3g} of {total_parameters(shape):.3g} parameters")
    return lines


def fits_line(config: TrainingConfig, shape: ArchitectureConfig | None, num_ranks: int) -> str:
    """By how much the memory plan of a configuration without problems fits."""
    shape, cluster = shape if shape is not None else config.model.architecture, config.cluster
    if shape is None:
        return "Fits: not known without the model's shape"
    stages = estimate_memory(config, shape, num_ranks)
    worst = max(stages, key=lambda stage: stage.total)
    takes = f"{worst.total / GIB:.2f} GiB of a rank in the {worst.fullest}"
    if cluster.memory_gib is None:
        return f"Fits: not known without cluster.memory_gib; the plan takes {takes}"
    node = node_host_bytes(stages, cluster.ranks_per_node) / GIB
    rest = f", the KV cache ({worst.parts[KV] / GIB:.2f}) included" if KV in worst.parts else ""
    return (
        f"Fits: {cluster.memory_gib - worst.total / GIB:.2f} GiB to spare; the plan takes {takes}{rest}, of "
        f"{cluster.memory_gib:g}, and {node:.0f} GiB of a node's host, of {cluster.host_gib:g}"
    )


def _memory_table(stages: list[RankMemory], rows: dict[str, list[int]], all_rows: bool) -> list[str]:
    """A column a stage; `rows`: bytes by name and stage. Those of 0.00 GiB are left out but for `all_rows`."""
    header = ["", *[f"stage {stage.stage}" for stage in stages]]
    texts = {name: [f"{size / GIB:.2f}" for size in sizes] for name, sizes in rows.items()}
    return _table(header, [[name, *row] for name, row in texts.items() if all_rows or {*row} != {"0.00"}])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned([header, *rows])]


def _span(first: int, size: int) -> str:
    return str(first) if size == 1 else f"{first}-{first + size - 1}"


def _grid(dims: Dims) -> list[str]:
    """A row a data-parallel replica, a column a pipeline stage; a cell holds its TP (x CP) ranks in order."""
    inner = dims.tp * dims.cp
    experts = f", experts over {dims.ep}" if dims.ep > 1 else ""
    lines = [f"Ranks: {dims.world_size} = tp {dims.tp} x pp {dims.pp} x cp {dims.cp} x dp {dims.dp}{experts}"]
    within = "context parallel slower, tensor parallel faster" if dims.cp > 1 else "tensor parallel rank 0, 1, ..."
    lines.append(f"  in a cell: {within}" if inner > 1 else "  in a cell: the rank")
    shown = range(dims.dp) if dims.dp <= MAX_GRID_ROWS else [*range(MAX_GRID_ROWS - 1), dims.dp - 1]
    header = ["", *[f"stage {pp}" for pp in range(dims.pp)]]
    rows = [[f"dp {dp}", *[_span(dims.rank_at(dp=dp, pp=pp), inner) for pp in range(dims.pp)]] for dp in shown]
    if dims.dp > MAX_GRID_ROWS:
        rows.insert(-1, ["...", *["..."] * dims.pp])
    return lines + _table(header, rows)


def _engines(config: Config, num_ranks: int) -> list[str]:
    size = config.rollout.tp
    count = num_ranks // size
    spans = [_span(i * size, size) for i in range(count)]
    shown = ", ".join(spans) if count <= MAX_GRID_ROWS else f"{spans[0]}, {spans[1]}, ..., {spans[-1]}"
    each = "rank" if size == 1 else "ranks"
    first = f"Rollout engines: {count} of {size} {each}: {shown}"
    note = getattr(config.rollout.engine_process, "note", None)
    notes = [f"  {note}"] if note else []
    drafts = _speculation(config)
    return [first, *notes, drafts, *_idle(config, num_ranks), _evaluations(config), *_without_effect(config)]


def _speculation(config: Config) -> str:
    """What drafts in rollouts, how much and by which choice."""
    section, start, most = config.rollout.speculation, "", config.rollout.speculation.longest_draft
    if section.drafter == "none":
        return "  drafter: none"
    if (drafter := section.trained) is not None:
        start = " (new, from the policy)" if section.drafter_path is None else f" of {section.drafter_path}"
        most = min(most, drafter.block_size) if isinstance(drafter, BlockFacts) else most
    choice = f", {section.selector}" if CAPABILITIES[config.rollout.backend].selectors else ""
    return f"  drafter: {section.drafter}{start}, up to {most} tokens{choice}"


def _idle(config: Config, num_ranks: int) -> list[str]:
    """What an idle engine does."""
    reason = why_no_pre_rollouts(config, num_ranks)
    if reason is not None:
        return [f"  no pre-rollouts: {reason}"]
    then = ", then trains the drafter" if config.idle.train_drafter else ""
    what, tokens = "responses to", config.rollout.max_tokens
    if config.env is not None:
        what, tokens = "first turns of", config.env.max_turn_tokens or tokens
    return [f"  an idle one pre-rolls {what} the next two steps' prompts{then}; {_drafts(config, tokens)}"]


def _evaluations(config: Config) -> str:
    """Whether an evaluation drafts with the last one's responses."""
    if (reason := why_no_eval_drafts(config)) is not None:
        return f"  {reason}" if reason == NO_EVALUATIONS else f"  an evaluation does not draft: {reason}"
    tokens = config.eval.max_tokens or config.rollout.max_tokens
    return f"  an evaluation verifies the last one's responses; {_drafts(config, tokens)}"


def _drafts(config: Config, tokens: int) -> str:
    """The most that replicas pass to each other, and how many responses of full length, `tokens`, that is."""
    mib = config.idle.pre_rollout_mib
    return f"at most {mib:g} MiB of drafts: {int(mib * 2**20) // (4 * tokens):,} responses of {tokens} tokens"


def _without_effect(config: Config) -> list[str]:
    """A default that the engine leaves without effect; of other settings it is a warning."""
    backend = config.rollout.backend
    if CAPABILITIES[backend].logprobs or not config.algorithm.importance_cap:
        return []
    return [f"  no effect with {backend}: algorithm.importance_cap: the engine gives no log-probs"]


def _memory(
    config: TrainingConfig,
    shape: ArchitectureConfig | None,
    num_ranks: int,
    device: Device | None,
    all_rows: bool,
) -> list[str]:
    if shape is None:
        return [f"Memory: unknown ({config.model.path} is not here and model.architecture is not set)"]
    stages = estimate_memory(config, shape, num_ranks, device)
    rows = {name: [stage.parts[name] for stage in stages] for name in stages[0].parts}
    if len(stages[0].phases) > 1:
        rows |= {f"in the {phase}": [stage.of_phase(phase) for stage in stages] for phase in stages[0].phases}
    rows["at most"] = [stage.total for stage in stages]
    limit = config.cluster.memory_gib
    of_limit = "" if limit is None else f", of {limit:g} that it has"
    lines = [f"Memory of a rank, estimated, GiB{of_limit} ({total_parameters(shape):.3g} parameters)"]
    lines += _memory_table(stages, rows, all_rows)
    if config.rl is not None:
        lines += _off_line(config.rl, shape, num_ranks, device, stages)
        lines += _cache_line(config.rl, shape, stages[0].parts[KV], resolve_device(config, device))
    if stages[0].host:
        lines.append("Of the host's memory, for a rank, at most (pinned blocks are rounded up to powers of two)")
        host = {name: [stage.host[name] for stage in stages] for name in stages[0].host}
        lines += _memory_table(stages, host, all_rows)
        node = node_host_bytes(stages, config.cluster.ranks_per_node) / GIB
        lines.append(f"  a node of {config.cluster.ranks_per_node}: {node:.1f} of {config.cluster.host_gib:g} GiB")
    return lines


def _off_line(
    config: Config, shape: ArchitectureConfig, num_ranks: int, device: Device | None, on: list[RankMemory]
) -> list[str]:
    """The plan without TLT beside the one with it, `on`."""
    if (without := without_tlt(config)) == config:
        return []
    off = estimate_memory(without, shape, num_ranks, device)
    caches, most, hosts = (
        [f"{size / GIB:.1f}" for size in sizes]
        for sizes in (
            (off[0].parts[KV], on[0].parts[KV]),
            (max(stage.total for stage in off), max(stage.total for stage in on)),
            (node_host_bytes(off, config.cluster.ranks_per_node), node_host_bytes(on, config.cluster.ranks_per_node)),
        )
    )
    host = f", of a node's host {' to '.join(hosts)}" if on[0].host else ""
    return [f"  TLT off to on: KV cache {' to '.join(caches)} GiB, a rank at most {' to '.join(most)}{host}"]


def full_requests(config: Config, shape: ArchitectureConfig, cache_bytes: int) -> int:
    """Requests of full length that an engine's KV cache of `cache_bytes` a rank holds."""
    return cache_bytes // (config.longest_sequence * kv_bytes_per_token(config, shape))


def _cache_line(config: Config, shape: ArchitectureConfig, cache_bytes: int, device: Device | None) -> list[str]:
    """The requests that the cache holds; on CUDA without a limit it is only known that one must fit."""
    rollout = config.rollout
    if (share := rollout.cache_share) is not None:
        at = f"rollout.{rollout.backend}.kv_cache_fraction"
        return [f"  the KV cache takes {at} = {share:g} of what is free at its start"]
    held, length = full_requests(config, shape, cache_bytes), config.longest_sequence
    if device == "cuda" and config.rollout.kv_cache_mib is None and config.cluster.memory_gib is None:
        return [f"  the KV cache takes what remains of the GPU; {cache_bytes / GIB:.2f} GiB hold one request"]
    running = config.rollout.max_running_requests
    lines = [f"  the KV cache of an engine holds {held} requests of full length ({length} tokens); {running} may run"]
    if _FEW * held < running:
        lines.append("  warning: fewer than a quarter: requests that find no room are preempted and computed again")
    return lines


def _carry_over(config: Config) -> list[str]:
    """How many steps a response may take, and that batches vary."""
    carry_over = config.rollout.carry_over
    if carry_over is None:
        return []
    most = -(-config.rollout.max_tokens // carry_over)
    return [
        f"  rollout.carry_over: {carry_over} tokens of a response a step, so it ends after at most {most} steps",
        "  the update has the groups that are complete: fewer in the first steps, in the long run as many as are begun",
    ]


def _tokens(config: Config, dims: Dims) -> list[str]:
    prompts, samples = config.train.prompts_per_step, config.rollout.samples_per_prompt
    responses = prompts * samples
    steps = config.algorithm.mini_batches
    most = responses * config.longest_trained
    pack = micro_batch_tokens(config) * dims.cp
    packs = -(-most // (dims.dp * steps * pack))
    plural = "s" if steps > 1 else ""
    return [
        f"One step: {prompts} prompts x {samples} responses = {responses} sequences, at most {most} tokens",
        f"  {steps} optimizer step{plural} of {responses // steps} sequences",
        f"  {responses / dims.dp:g} sequences a data-parallel replica",
        *_carry_over(config),
        f"  at most {packs} micro-batches of {pack} tokens a replica and optimizer step",
    ]

"""The eagle drafter of a policy: warm-up on answers of the engine, and its acceptance.

Hidden states come from one forward of the policy's decoder over prompts with their answers. Acceptance is measured on
held-out answers, where the policy's next-token distribution p and the drafter's q are known:

    tv        sum_v min(p_v, q_v) = 1 - TV(p, q): the most that any exact verification of a sampled draft accepts
    coupled   sum_v 1 / sum_w max(p_w / p_v, q_w / q_v): both draw their arg max with the same Gumbel noise
    argmax    p(arg max q): a deterministic draft, one candidate
    top4      p(four best of q): the same, four siblings

Legend: R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.drafter.batching import DraftSequence, collate, epoch, pack
from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.drafter.trainer import DrafterTrainer
from megatron_tlt.models.base import Decoder
from megatron_tlt.models.eagle.model import EagleModel, PairBatch, PairLayout
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.types import Prompt, Sample

_BLOCK = 16
_FORWARD_TOKENS = 4096
_MEASURES = ("tv", "coupled", "argmax", "top4")


def collect(decoder: Decoder, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[DraftSequence]:
    """Samples with the policy's hidden state at every position, on the decoder's device."""
    prompt_of = {p.prompt_id: p.token_ids for p in prompts}
    pending = [
        (torch.tensor([*prompt_of[s.prompt_id], *s.token_ids]), len(prompt_of[s.prompt_id])) for s in samples
    ]
    longest = max(len(ids) for ids, _ in pending)
    kv = decoder.new_kv_cache(2 * (max(_FORWARD_TOKENS, longest) // _BLOCK + 64), _BLOCK)
    found: list[DraftSequence] = []
    group: list[tuple[Tensor, int]] = []
    for sequence in [*pending, None]:
        size = sum(len(ids) for ids, _ in group)
        if group and (sequence is None or size + len(sequence[0]) > _FORWARD_TOKENS or len(group) == 64):
            states = decoder.forward(_prefill([ids for ids, _ in group], decoder.device), kv).all_hidden
            assert states is not None
            for (ids, prompt), hidden in zip(
                group, states.split([len(ids) for ids, _ in group]), strict=True
            ):
                found.append(DraftSequence(ids.to(decoder.device), hidden.clone(), prompt))
            group = []
        if sequence is not None:
            group.append(sequence)
    return found


def _prefill(sequences: list[Tensor], device: torch.device) -> DecoderInput:
    """Whole sequences, each in blocks of its own, all hidden states wanted."""
    positions, slots, starts, tables, first = [], [], [0], [], 0
    for ids in sequences:
        blocks = -(-len(ids) // _BLOCK)
        positions.append(torch.arange(len(ids)))
        slots.append(first * _BLOCK + torch.arange(len(ids)))
        tables.append(list(range(first, first + blocks)))
        starts.append(starts[-1] + len(ids))
        first += blocks
    width = max(map(len, tables))
    padded = torch.tensor([t + [0] * (width - len(t)) for t in tables])
    lengths = torch.tensor([len(ids) for ids in sequences])
    begins = torch.tensor(starts)
    parts = (
        torch.cat(sequences),
        torch.cat(positions),
        torch.cat(slots),
        begins,
        lengths,
        padded,
        begins[1:] - 1,
    )
    batch = DecoderInput.of([p.to(device, torch.int32) for p in parts])
    batch.all_hidden = True
    return batch


def warm_up(
    folder: Path,
    policy: Any,
    embed: Tensor,
    head: Tensor,
    sequences: list[DraftSequence],
    section: DrafterSection,
) -> EagleModel:
    """Trains a drafter for `section.num_steps` steps and writes it. `policy` is its `ModelConfig`."""
    model = EagleModel(policy)
    model.initialise(section.seed)
    model.to(embed.device)
    trainer = DrafterTrainer(model, embed, head, section)
    visit = 0
    while trainer.trained_steps < section.num_steps:
        for batch in epoch(sequences, section.batch_tokens, section.window, (section.seed, visit)):
            metrics = trainer.step(batch)
            if trainer.trained_steps % 100 == 0:
                print(f"  {trainer.trained_steps} steps, acceptance {metrics['accept/1']:.3f}", flush=True)
            if trainer.trained_steps == section.num_steps:
                break
        visit += 1
    save_drafter(folder, policy, model.state_dict(), trained_steps=trainer.trained_steps)
    return model


@torch.inference_mode()
def acceptance(
    model: EagleModel,
    embed: Tensor,
    head: Tensor,
    sequences: list[DraftSequence],
    steps: int,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    """One row for each drafted position: means of the four measures over the held-out answers' tokens."""
    totals = torch.zeros(steps, len(_MEASURES) + 1, dtype=torch.float64)
    for group in pack([s for s in sequences if s.num_bases], batch_tokens):
        batch = collate(group)
        layout = PairLayout(batch)
        with torch.autocast(embed.device.type, torch.bfloat16, enabled=embed.device.type == "cuda"):
            outputs = model.unroll(embed, batch, layout, steps)
        for step, output in enumerate(outputs):
            totals[step] += _compare(batch, layout, output, head, step)
    return [
        {"measure": "acceptance", "position": step + 1, "tokens": int(row[-1])}
        | {name: float(value / row[-1]) for name, value in zip(_MEASURES, row, strict=False)}
        for step, row in enumerate(totals)
        if row[-1]
    ]


def _compare(batch: PairBatch, layout: PairLayout, output: Tensor, head: Tensor, step: int) -> Tensor:
    """Sums of the measures over the rows of one step, and their number."""
    valid = layout.valid(step)
    rows = layout.bases[valid] + step
    sums = torch.zeros(len(_MEASURES) + 1, dtype=torch.float64)
    for target, drafted in zip(batch.hidden[rows].split(512), output[valid].split(512), strict=True):
        p, q = ((x.to(head.dtype) @ head.T).float().softmax(-1) for x in (target, drafted))
        best = q.topk(4, dim=-1).indices
        likely = p.gather(1, best)
        values = (
            torch.minimum(p, q).sum(),
            gumbel_match(p, q).sum(),
            likely[:, 0].sum(),
            likely.sum(),
        )
        sums += torch.tensor([*map(float, values), float(len(p))], dtype=torch.float64)
    return sums


def gumbel_match(p: Tensor, q: Tensor) -> Tensor:
    """[R, V], [R, V] -> [R]: the chance that arg max(log p + G) = arg max(log q + G) for the same noise G."""
    p, q = p.double().clamp(min=1e-30), q.double().clamp(min=1e-30)
    match = torch.zeros(len(p), dtype=torch.float64, device=p.device)
    for v in range(p.shape[1]):  # token by token: [R, V, V] would not fit large vocabularies
        match += 1 / torch.maximum(p / p[:, v : v + 1], q / q[:, v : v + 1]).sum(-1)
    return match

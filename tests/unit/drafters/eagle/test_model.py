"""The drafter's class: names, arithmetic against a plain rewriting, unrolling against drafting one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.model import START_SCALE, EagleModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import DraftSequence, collate
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.decoders.torch.layers import rms_norm
from megatron_tlt.models.hf.config import ModelConfig
from tests.helpers.pairs import expected
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_drafter, random_sequence
from tests.helpers.tiny_models import moe_config, random_tensors


def model_of(config: ModelConfig) -> EagleModel:
    model = EagleModel(EagleConfig.of(config))
    model.load_full(random_drafter(config).items())
    return model


def draft_one_by_one(
    config: ModelConfig, embed: torch.Tensor, s: DraftSequence, base: int, steps: int
) -> list[torch.Tensor]:
    """Outputs of a draft from `base` fed with the true tokens: the whole sequence of pairs anew for every token."""
    policy, drafter = [("model.embed_tokens.weight", embed)], [*random_drafter(config).items()]
    hidden, out = s.hidden[:base], []
    for step in range(steps):
        tokens = s.token_ids[1 : base + step + 1].tolist()
        out.append(expected(EagleConfig.of(config), policy, drafter, tokens, hidden, s.offset + 1)[1][-1])
        hidden = torch.cat([hidden, out[-1][None]])
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_unrolling_equals_drafting_one_by_one(family: str) -> None:
    """Packed with others of other lengths, every base, every step; one begins late as a window, one has no base."""
    config, steps = FAMILIES[family], 4
    sequences = [random_sequence(config, n, p) for n, p in ((12, 5), (3, 1), (20, 15), (17, 17), (7, 2))]
    sequences[2].offset = 30
    embed, _ = lookup_tables(config)
    batch = collate(sequences)
    layout = PairLayout(batch)
    with torch.no_grad():
        got = model_of(config).unroll(embed, batch, layout, steps)
    row = 0
    for s in sequences:
        for base in range(s.first_base, s.length - 1):
            real = min(steps, s.length - 1 - base)
            want = draft_one_by_one(config, embed, s, base, real)
            for step in range(steps):
                assert bool(layout.valid(step)[row]) == (step < real)
            torch.testing.assert_close(
                torch.stack([g[row] for g in got[:real]]), torch.stack(want), atol=2e-5, rtol=1e-4
            )
            row += 1
    assert row == len(layout.bases) == sum(s.num_bases for s in sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_started_from_the_policy_is_its_second_layer_and_near_the_identity(family: str) -> None:
    config = FAMILIES[family]
    policy = dict(random_tensors(config.parameter_shapes(), 3))
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    model.start_from_policy(policy.__getitem__)
    named = dict(model.named_parameters())
    assert torch.equal(named["layer.mlp.up_proj.weight"], policy["model.layers.1.mlp.up_proj.weight"])
    added = named["layer.self_attn.o_proj.weight"]
    assert added.norm() < policy["model.layers.1.self_attn.o_proj.weight"].norm()
    token, hidden = torch.randn(2, 5, config.hidden_size)
    apart = model.join(token, torch.zeros_like(token)), model.join(torch.zeros_like(hidden), hidden)
    assert torch.equal(apart[0], token)  # the embedding as the policy's layers read it
    assert torch.cosine_similarity(apart[1], hidden).min() > 0.9


@pytest.mark.parametrize("width", [576, 1024])
def test_projections_of_a_real_models_layer_read_states_of_their_own_size(width: int) -> None:
    """Queries, keys and values of a state are those of the policy's layer, whose norm comes before them."""
    config, policy = real_policy(width)
    model = EagleModel(EagleConfig.of(config))
    model.initialise(0)
    model.start_from_policy(policy.__getitem__)
    unit = rms_norm(torch.randn(50, width), torch.ones(width), 0.0)
    inputs = unit * policy["model.layers.1.input_layernorm.weight"]
    states = unit * policy["model.norm.weight"].square().mean().sqrt()
    for part in ("q_proj", "k_proj", "v_proj"):
        want = inputs @ policy[f"model.layers.1.self_attn.{part}.weight"].T
        torch.testing.assert_close(getattr(model.layer.self_attn, part)(states), want, atol=1e-3, rtol=1e-3)


def real_policy(width: int) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """A Llama of two layers whose second one, norms and LM head have the sizes that SmolLM2-135M's have."""
    config = replace(
        FAMILIES["llama"], hidden_size=width, num_heads=width // 64, num_kv_heads=1, head_dim=64, intermediate_size=128
    )
    policy = dict(random_tensors(config.parameter_shapes(), 3))
    sizes = {"q_proj": 0.25, "k_proj": 0.28, "v_proj": 0.12, "o_proj": 0.14, "gate": 0.2, "up": 0.18, "down": 0.18}
    sizes |= {"embed_tokens": 0.14, "lm_head": 0.14}
    for name, tensor in policy.items():
        size = next((size for part, size in sizes.items() if part in name), None)
        if size is not None:
            tensor.mul_(size / tensor.square().mean().sqrt())
        else:
            tensor.fill_(1.8 if name == "model.norm.weight" else 0.17)
    return config, policy


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_policys_layer_with_experts_gives_all_but_the_mlp(kind: str) -> None:
    config = moe_config("qwen3_moe", 60)
    policy = dict(random_tensors(config.parameter_shapes(), 3))
    made = EagleConfig.of(config)
    three = Eagle3Config(config, made.layer, made.draft_vocab_size, (0, 0, 0))
    model = KINDS[kind].build_model(made if kind == "eagle" else three)
    model.initialise(0)
    before = model.block.mlp.up_proj.weight.clone()
    model.start_from_policy(policy.__getitem__)
    start = "model.layers.1.self_attn."
    assert torch.equal(model.block.self_attn.o_proj.weight, START_SCALE * policy[f"{start}o_proj.weight"])
    assert torch.equal(model.block.mlp.up_proj.weight, before)


def test_tensors_that_do_not_fit_are_all_named() -> None:
    config = FAMILIES["qwen3"]
    weights = random_drafter(config)
    weights["fc.weight"] = weights["fc.weight"][:, 1:]
    del weights["layer.mlp.up_proj.weight"]
    weights["model.embed_tokens.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        EagleModel(EagleConfig.of(config)).load_full(weights.items())
    for text in ("fc.weight has shape", "up_proj.weight is missing", "embed_tokens.weight is not part"):
        assert text in str(caught.value)

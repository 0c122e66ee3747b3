"""Training of block drafters: the loss against a loop over rows, windows whose drafter is served, and published files:
a drafter overfitted on one text drafts that text at every slot, in whatever form it comes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.lr_schedule import LearningRate
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.base import SavedDrafter
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.dspark.kind import DSparkKind
from megatron_tlt.drafters.dspark.loss import block_loss, draw_anchors
from megatron_tlt.drafters.dspark.model import BlockModel
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.loss import LossInputs
from megatron_tlt.drafters.training.batching import DraftSequence, bases_by_step, collate
from megatron_tlt.drafters.training.online_trainer import OnlineDrafterTrainer
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.decoders.factory import build_decoder
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.types import HiddenStateSample
from tests.helpers.pairs import DFLASH2, Rows, block_config
from tests.helpers.tiny_drafters import (
    DEEP,
    export_drafter,
    lookup_tables,
    random_drafter,
    random_sequence,
    spread,
    trajectory,
)
from tests.helpers.tiny_models import random_weights

POLICY = DEEP["qwen3"]
TABLES = lookup_tables(POLICY)
KIND, WANTED = DSparkKind(), SpeculationSection(drafter="dspark")
CONFIGS = {
    "dspark": block_config(POLICY),
    "bonus": block_config(POLICY, sample_from_anchor=False),
    "dflash": block_config(POLICY, sample_from_anchor=False, markov_rank=0),
    "dflash2": block_config(POLICY, **DFLASH2),
}


def text(config: BlockConfig, length: int = 26, seed: int = 0) -> HiddenStateSample:
    """A text of different tokens, each of which the policy is nearly sure of."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(POLICY.vocab_size, generator=generator)[:length]
    states = torch.randn(length - 1, len(config.aux_layers) * POLICY.hidden_size, generator=generator)
    return HiddenStateSample(
        trajectory(tokens.numpy(), 3, seed), torch.cat([states, 3 * TABLES[1][tokens[1:]]], dim=-1)
    )


@pytest.mark.parametrize(
    ("name", "vocab", "t"), [("dspark", 60, 0.6), ("bonus", None, 1.0), ("dflash", 60, 1.0), ("dflash2", None, 0.6)]
)
def test_loss_and_gradients_equal_a_loop_over_rows(monkeypatch, name: str, vocab: int | None, t: float) -> None:
    config = replace(CONFIGS[name], draft_vocab_size=vocab or POLICY.vocab_size)
    for constant, value in {"_CE": 0.7, "_TV": 0.2, "_DECAY": 0.5}.items():
        monkeypatch.setattr(f"megatron_tlt.drafters.loss.{constant}", value)
    model = BlockModel(config)
    model.load_full(random_drafter(config).items())
    batch = collate([random_sequence(config, n, p, seed=p) for n, p in ((19, 4), (4, 1), (34, 2), (6, 4))])
    layout, head = PairLayout(batch), TABLES[1]
    chosen, ids = draw_anchors(model, layout), model.token_ids()
    assert len(chosen) == -(-len(layout.bases) // 6)
    chosen = np.union1d(chosen, [len(layout.bases) - 1])  # a block of which the text's end leaves one position
    slots = torch.randn(len(chosen), 6, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    got, parts = block_loss(model, slots, chosen, layout, LossInputs(batch, head, head, 8, 0.0, t))
    rows = head if ids is None else head[ids]
    terms: list[list[torch.Tensor]] = [[] for _ in range(8)]
    for i, base in enumerate(layout.base_rows[chosen].tolist()):
        end = next(e for e in batch.starts if e > base)
        for k in range(min(config.num_drafted, end - 1 - base)):
            z = rows @ slots[i, k + config.first_slot]
            if model.markov_head is not None:
                z = z + model.markov_head.markov_w2(model.markov_head.markov_w1(batch.tokens[base + k]))
            p, log_q = (rows @ batch.hidden[base + k, -64:] / t).softmax(0), (z / t).log_softmax(0)
            ce, tv = -(p * log_q).sum(), 0.5 * (p - log_q.exp()).abs().sum()
            known = ids is None or int(batch.tokens[base + k + 1]) in ids
            terms[k].append(known * (0.7 * ce + 0.2 * tv))
            if (selector := model.candidate_selector) is not None:
                state, true = slots[i, k + 1].detach(), int(batch.tokens[base + k + 1])
                few = (rows @ state).topk(16).indices.tolist()
                few = few if true in few else [*few[:-1], true]
                before = selector.predecessor_codebook[batch.tokens[base + k]] * selector.hidden_projection(state)
                scores = torch.stack([rows[c] @ state + before @ selector.successor_codebook[c] for c in few]) / t
                terms[k].append(terms[k].pop() + 0.1 * cross_entropy(scores, torch.tensor(few.index(true))))
    want = sum(0.5**k * term for k, of_step in enumerate(terms) for term in of_step) / sum(map(len, terms))
    assert len(terms[0]) == len(chosen) > len(terms[1])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert len(parts["ce"]) == len(parts["accept"]) == 8 and float(parts["accept"][7]) == 0
    heads = [head for head in (model.markov_head, model.candidate_selector) if head is not None]
    leaves = [slots, *(p for head in heads for p in head.parameters())]
    for a, b in zip(torch.autograd.grad(2 * got, leaves), torch.autograd.grad(2 * want, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_anchors_are_others_in_every_step_and_shares_of_ranks_add_up() -> None:
    """A rank's share stands for its bases: with one anchor at each base the sum of shares is the loss of the whole."""
    config = replace(CONFIGS["dspark"], block_size=2)
    sequences = [random_sequence(config, n, p, seed=p) for n, p in ((19, 4), (34, 2))]
    t = DrafterTrainer(BlockModel(config), DrafterSection(draft_steps=2))
    t.model.load_full(random_drafter(config).items())
    layout, drawn = PairLayout(collate(sequences)), []
    for step in range(20):
        t.model.trained_steps = step
        drawn.append(draw_anchors(t.model, layout))
    assert len({tuple(d) for d in drawn}) > 15 and set(np.concatenate(drawn)) == set(range(len(layout.bases)))
    counts = bases_by_step(sequences, 2)

    def loss(given: list[DraftSequence], counts: list[int] | None = None) -> float:
        batch = collate(given)
        layout = PairLayout(batch)
        chosen = np.arange(len(layout.bases))
        slots = t.model.fill(TABLES[0], batch, layout, chosen)
        inputs = LossInputs(batch, *TABLES, 2, 0.0, 1.0, counts)
        return float(block_loss(t.model, slots, chosen, layout, inputs)[0].detach())

    assert sum(loss([s], counts) for s in sequences) == pytest.approx(loss(sequences), rel=1e-5)


def trainer(name: str = "dspark") -> OnlineDrafterTrainer:
    model = BlockModel(CONFIGS[name])
    model.initialise(0)
    options = {"lr": 3e-3, "start_lr": 3e-3, "micro_step_tokens": 64}
    made = OnlineDrafterTrainer(model, DrafterSection(online=options))
    made._trainer.rate, made._decay = LearningRate(3e-3), 0.5
    return made


def window(t: OnlineDrafterTrainer, version: int, steps: int = 30) -> list[dict[str, float]]:
    """A window of training on three texts, and its merge."""
    t.begin_step(version, lambda: TABLES)
    for seed in range(3):
        t.buffer.add(text(t.model.config, seed=seed))
    seen = [t.train_step() for _ in range(steps)]
    t.merge()
    return seen


def decoder_with(config: BlockConfig, weights):
    policy = build_decoder(POLICY, kernels="torch", aux_layers=config.aux_layers)
    tables = dict(zip(("model.embed_tokens.weight", "lm_head.weight"), TABLES, strict=True))
    policy.load_weights((dict(random_weights(POLICY)) | tables).items())
    made = KIND.build_decoder(policy, config)
    made.load_weights(weights.items())
    return made


def drafts(decoder, sample: HiddenStateSample, wanted: int = 9) -> list[list[int]]:
    """Greedy drafts behind every token of a text that has a whole block behind it."""
    tokens = sample.trajectory.token_ids.tolist()
    ends = range(3, len(tokens) - decoder.config.num_drafted + 1)
    rows = Rows(decoder, [tokens[:n] for n in ends], [sample.hidden[: n - 1] for n in ends], temperature=0.0)
    drafted = rows.draft(wanted)
    return [part.tolist() for part in np.split(drafted.tokens, np.cumsum(drafted.counts)[:-1])]


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_the_loss_falls_and_the_served_drafter_is_the_trained_one_after_every_sync(name: str) -> None:
    """One engine's drafter, whose weights each window replaces, against one made from the window's weights alone."""
    t = trainer(name)
    served = decoder_with(t.model.config, t.weights())
    before = drafts(served, text(t.model.config))
    for version in (1, 2):
        seen = window(t, version)
        first, last = (np.mean([m["loss"] for m in part]) for part in (seen[:5], seen[-5:]))
        assert last < 0.9 * first
        weights = t.weights()
        assert all(not torch.equal(weights[n], p) for n, p in t.model.named_parameters()), "the mean is served"
        served.load_weights(weights.items())
        assert all(torch.equal(served.model.state_dict()[n], w) for n, w in weights.items())
        now = drafts(served, text(t.model.config))
        assert now == drafts(decoder_with(t.model.config, weights), text(t.model.config)) != before
        before = now


@cache
def overfitted(name: str) -> BlockModel:
    model = BlockModel(CONFIGS[name])
    model.initialise(1)
    section = DrafterSection(draft_steps=6, lr=8e-3, num_steps=80)
    t = DrafterTrainer(model, section)
    batch = collate([DraftSequence.of(text(model.config))])
    for _ in range(section.num_steps):
        t.step(batch, TABLES)
    return model


def published(out: Path, form: str, name: str) -> Path:
    """The overfitted drafter as others write it: DeepSpec (as ours is exported), z-lab, speculators; DFlash 2 with the
    entries of z-lab's `dflash2-config.json` and speculators' `DFlash2SpeculatorConfig`.
    """
    model, config = overfitted(name), CONFIGS[name]
    saved = SavedDrafter(config, model.state_dict())
    files = KIND.engine_files(saved.config, saved.weights, "vllm", torch.float32)
    about, tensors = files.json["config.json"], dict(files.tensors["model.safetensors"])
    out.mkdir(parents=True)
    if form == "ours":
        save_drafter(out, config, model.state_dict())
        return out
    if form == "deepspec":
        tensors |= {"embed_tokens.weight": torch.zeros(101, 64), "lm_head.weight": torch.zeros(101, 64)}
        tensors["confidence_head.proj.weight"] = torch.zeros(1, 64)
        about = {n: v for n, v in about.items() if n not in ("sample_from_anchor", "dspark_bonus_anchor")}
        about |= {"num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": False}
    if form == "speculators":
        layer = {**about, "architectures": ["Qwen3ForCausalLM"]}
        nested = about.get("dflash_config", {})
        for entry in ("target_layer_ids", "dflash_config", "block_size", "markov_rank", "mask_token_id", "is_causal"):
            layer.pop(entry, None)
        about = {
            "speculators_model_type": name if name in ("dflash", "dflash2") else "dspark",
            "transformer_layer_config": layer,
            "draft_vocab_size": POLICY.vocab_size,
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": [i + 1 for i in config.aux_layers],
            "mask_token_id": config.mask_token_id,
            **({"markov_rank": config.markov_rank, "markov_head_type": "vanilla"} if config.markov_rank else {}),
            **({"sample_from_anchor": True} if config.sample_from_anchor else {}),
            **({n: v for n, v in nested.items() if n.startswith(("conv_", "selector_"))}),
        }
        tensors |= {"d2t": torch.zeros(101, dtype=torch.int64), "t2d": torch.ones(101, dtype=torch.bool)}
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(about))
    return out


FORMS = [
    ("ours", "dspark"),
    ("ours", "dflash"),
    ("deepspec", "dspark"),
    ("exported", "bonus"),
    ("speculators", "dspark"),
    ("speculators", "bonus"),
    ("speculators", "dflash"),
    ("z-lab", "dflash"),
    ("ours", "dflash2"),
    ("z-lab", "dflash2"),
    ("speculators", "dflash2"),
]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_an_overfitted_drafter_matches_at_every_slot_in_every_form(tmp_path: Path, form: str, name: str) -> None:
    saved = load_drafter(published(tmp_path / form, form, name), POLICY, WANTED)
    same = replace(
        saved.config.layer, **{n: getattr(CONFIGS[name].layer, n) for n in ("eos_token_ids", "tie_word_embeddings")}
    )
    assert replace(saved.config, layer=same) == CONFIGS[name]
    sample = text(CONFIGS[name])
    tokens, most = sample.trajectory.token_ids.tolist(), CONFIGS[name].num_drafted
    assert most == (6 if name == "dspark" else 5)
    found = drafts(decoder_with(saved.config, saved.weights), sample)
    assert found == [tokens[n : n + most] for n in range(3, len(tokens) - most + 1)]
    facts = WANTED.model_copy(update={"drafter_path": str(tmp_path / form)}).trained
    sizes = facts.layers_read, facts.cached_layers, facts.block_size, facts.rank
    assert sizes == (3, 2, 6, CONFIGS[name].markov_rank or CONFIGS[name].selector_rank)


def test_dflash2_has_the_names_and_shapes_of_the_published_file(tmp_path: Path) -> None:
    """z-lab/dflash, tests/fixtures/dflash2-{config,safetensors-header}.json, but for its scaled and capped logits."""
    h, width, vocab = 6656, 19968, 202048
    sizes = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
    sizes |= {"block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49]}
    about = {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "dflash_config": sizes}
    about |= {"attention_bias": False, "hidden_act": "silu", "hidden_size": h, "intermediate_size": width}
    about |= {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
    about |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5}
    about |= {"rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    about |= {"max_position_embeddings": 131072, "max_window_layers": 5, "vocab_size": vocab, "eos_token_id": 200001}
    policy = ModelConfig("llama", vocab, h, 52, 32, 8, 128, width)
    assert KIND.public is not None and KIND.public.is_one(about)
    config = KIND.public.config(about, policy, None)
    assert isinstance(config, BlockConfig) and config.windows == (2048,) * 5 and config.num_drafted == 15
    want: dict[str, tuple[int, ...]] = {"fc.weight": (h, 33280), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    want |= {f"candidate_selector.{name}_codebook": (vocab, 256) for name in ("predecessor", "successor")}
    want |= {"candidate_selector.hidden_projection.weight": (256, h)}
    for at in (f"layers.{j}" for j in range(5)):
        want |= {f"{at}.{name}.base_kernel": (2, 2, h) for name in ("attention_conv", "mlp_conv")}
        want |= {f"{at}.{name}.kernel_projection.weight": (1664, h) for name in ("attention_conv", "mlp_conv")}
        want |= {f"{at}.{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        want |= {f"{at}.self_attn.{name}_norm.weight": (128,) for name in "qk"}
        want |= {f"{at}.self_attn.{name}_proj.weight": (1024, h) for name in "kv"}
        want |= {f"{at}.self_attn.q_proj.weight": (4096, h), f"{at}.self_attn.o_proj.weight": (h, 4096)}
        want |= {f"{at}.mlp.{name}_proj.weight": (width, h) for name in ("gate", "up")}
        want |= {f"{at}.mlp.down_proj.weight": (h, width)}
    assert config.shapes() == want
    (tmp_path / "config.json").write_text(json.dumps(about))
    planned = WANTED.model_copy(update={"drafter_path": str(tmp_path)}).trained.parameters(policy, None)
    assert planned == pytest.approx(sum(map(np.prod, want.values())), rel=1e-4)


def test_a_reduced_vocabulary_is_read_and_its_export_drafts_no_other_token(tmp_path: Path) -> None:
    """Through the policy's whole head, which an engine has."""
    config = block_config(POLICY, 40)
    weights = random_drafter(config)
    save_drafter(tmp_path / "ours", config, weights)
    assert load_drafter(tmp_path / "ours", POLICY).config == config
    export_drafter(tmp_path / "ours", tmp_path / "sglang", "sglang", torch.float16)
    exported = load_drafter(tmp_path / "sglang", POLICY)
    assert exported.config.draft_vocab_size == POLICY.vocab_size
    generator, before = torch.Generator().manual_seed(0), torch.arange(30, 60)
    state, head = torch.randn(30, 64, generator=generator), torch.randn(101, 64, generator=generator)
    logits = []
    for made, tensors in ((config, weights), (exported.config, exported.weights)):
        model = BlockModel(made)
        model.load_full(tensors.items())
        assert model.markov_head is not None
        outputs = torch.cat([state, model.markov_head.markov_w1(before)], -1)
        logits.append(spread(model, model.logits(outputs, head)))
    known = weights["t2d"]
    torch.testing.assert_close(logits[1][:, known], logits[0][:, known], atol=2e-3, rtol=2e-3)
    assert (logits[1][:, ~known] < -9000).all() and (logits[0][:, ~known] == float("-inf")).all()
    headless = block_config(POLICY, 40, markov_rank=0, sample_from_anchor=False)
    with pytest.raises(ConfigError, match="would draft tokens outside the vocabulary of 40"):
        KIND.engine_files(headless, random_drafter(headless), "vllm", torch.float32)
    about = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": config.layer.to_hf() | {"num_hidden_layers": 2},
    }
    about |= {"aux_hidden_state_layer_ids": [1, 3, 6], "block_size": 6, "mask_token_id": 7, "markov_rank": 12}
    (tmp_path / "public").mkdir()
    (tmp_path / "public/config.json").write_text(
        json.dumps(about | {"draft_vocab_size": 40, "sample_from_anchor": True})
    )
    save_file(
        {n: t for n, t in weights.items() if n != "t2d"} | {"lm_head.weight": torch.zeros(40, 64)},
        tmp_path / "public/model.safetensors",
    )
    read = load_drafter(tmp_path / "public", POLICY, WANTED)
    assert all(torch.equal(read.weights[n], t) for n, t in weights.items())


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"markov_head_type": "gated"}, "with markov_head_type = 'gated' is of a form"),
        (
            {"dflash_config": {"selector_top_k": 8, "output_multiplier": 0.196, "final_logit_softcapping": 20.0}},
            "with output_multiplier = 0.196, final_logit_softcapping = 20.0, selector_top_k = 8 is of a form",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "sliding windows and no is_causal",
        ),
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "layer_types, which says in which layers, is missing",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, "with linear_attention layers is not computed"),
        ({"is_causal": True}, "with is_causal = True is of a form"),
        ({"hidden_size": 96}, r"hidden size is \['96'\], the policy's 64"),
        ({"mask_token_id": 151669}, "mask_token_id = 151669: must be a row of the policy's embedding"),
        ({"block_size": None}, "an entry of a block drafter is missing or wrong"),
        ({"target_layer_ids": [0, 2]}, r"fc.weight has shape \(64, 192\)"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, entries: dict, says: str) -> None:
    config = CONFIGS["dspark"]
    files = KIND.engine_files(config, random_drafter(config), "vllm", torch.float32)
    save_file(files.tensors["model.safetensors"], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(files.json["config.json"] | entries))
    with pytest.raises(CheckpointError, match=says):
        load_drafter(tmp_path, POLICY, WANTED)


@pytest.mark.parametrize(
    ("engine", "more", "says"),
    [
        ("trtllm", {}, "TensorRT-LLM has no drafter of kind dspark"),
        ("vllm", {"markov_rank": 0}, "vLLM has no block drafter without a Markov head that drafts from the anchor"),
        ("sglang", {"layer": DEEP["llama"]}, "SGLang runs block drafters with layers of Qwen3's form only"),
    ],
)
def test_engines_that_cannot_run_one_are_named(engine: str, more: dict, says: str) -> None:
    config = block_config(POLICY, **more)
    with pytest.raises(ConfigError, match=says):
        KIND.engine_files(config, random_drafter(config), engine, torch.float32)

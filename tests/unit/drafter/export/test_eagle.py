"""Exports of the eagle drafter, read back as each engine reads them, draft what `EagleModel` drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafter.export.drafter import export_drafter
from megatron_tlt.drafter.kinds.base import Format
from megatron_tlt.drafter.kinds.eagle.kind import _config
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.config import ModelConfig, RopeScaling
from megatron_tlt.models.eagle.config import EagleConfig
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers import engine_drafters
from tests.helpers.tiny_drafters import FAMILIES, lookup_tables, random_drafter, random_sequence

STEPS = 4
LLAMA3 = replace(
    FAMILIES["llama"], rope_theta=5000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), tie_word_embeddings=True
)
WIDE_HEADS = replace(FAMILIES["llama"], head_dim=24)  # unrelated to hidden size / heads
POLICIES = {"llama": FAMILIES["llama"], "llama3": LLAMA3, "wide": WIDE_HEADS, "qwen2": FAMILIES["qwen2"]}
ENGINES = {"sglang": engine_drafters.SglangEagle1, "vllm": engine_drafters.VllmEagle1}


def our_logits(config: ModelConfig, base: int) -> torch.Tensor:
    """[STEPS, V] of a draft from place `base` of the test's sequence."""
    embed, head = lookup_tables(config)
    model = EagleModel(config)
    model.load_full(random_drafter(config).items())
    sequence = random_sequence(config, 20, 5)
    batch = collate([sequence])
    layout = PairLayout(batch)
    with torch.no_grad():
        outputs = model.unroll(embed, batch, layout, STEPS)
    return torch.stack([o[base - sequence.first_base] for o in outputs]) @ head.T


def engine_logits(engine: engine_drafters.Drafter, config: ModelConfig, base: int) -> torch.Tensor:
    embed, head = lookup_tables(config)
    sequence = random_sequence(config, 20, 5)
    return engine_drafters.chain(engine, sequence.token_ids, sequence.hidden, embed, head, base, STEPS)


def export(tmp_path: Path, config: ModelConfig, kind: Format, dtype: torch.dtype = torch.float32) -> Path:
    shape = EagleConfig.of(config)
    save_drafter(tmp_path / "drafter", shape, random_drafter(config), policy_version=7, trained_steps=30)
    export_drafter(tmp_path / "drafter", tmp_path / "out", kind, dtype)
    return tmp_path / "out"


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, atol=1e-5 * float(want.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_drafts_what_the_model_drafts(kind: Format, policy: str, tmp_path) -> None:
    config = POLICIES[policy]
    engine = ENGINES[kind](export(tmp_path, config, kind))
    for base in (4, 11, 15):
        want = our_logits(config, base)
        got = engine_logits(engine, config, base)
        assert close(got, want), (got - want).abs().max()


@pytest.mark.parametrize("kind", ENGINES)
def test_exactly_these_tensors_and_files(kind: Format, tmp_path) -> None:
    out = export(tmp_path, FAMILIES["qwen2"], kind, torch.bfloat16)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(out / "model.safetensors")
    layer = [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"self_attn.{p}_proj.bias" for p in "qkv"]
    layer += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")] + ["post_attention_layernorm.weight"]
    wanted = {"fc.weight"} | {f"layers.0.{n}" for n in layer} | ({"fc.bias"} if kind == "sglang" else set())
    assert set(tensors) == wanted
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    raw = json.loads((out / "config.json").read_text())
    assert (raw["rope_theta"], raw["rope_scaling"], raw["torch_dtype"]) == (10000.0, None, "bfloat16")
    card = (out / "README.md").read_text()
    assert "has not been run" in card
    assert "| optimizer steps | 30 |" in card


def test_hf_is_a_drafter_directory_with_a_card(tmp_path) -> None:
    config = FAMILIES["qwen3"]
    out = export(tmp_path, config, "hf")
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "drafter.safetensors"]
    saved = load_drafter(out, config)
    assert (saved.policy_version, saved.trained_steps) == (7, 30)
    given = random_drafter(config)
    assert saved.weights.keys() == given.keys()
    assert all(torch.equal(saved.weights[n], given[n]) for n in given)
    assert "a drafter directory of Megatron-TLT" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "policy", "says"),
    [
        ("trtllm", "llama", r"format = 'trtllm': TensorRT-LLM.* runs EAGLE-3 drafters only.*kind eagle3"),
        ("sglang", "qwen3", r"format = 'sglang': SGLang has no EAGLE-1 drafter whose attention normalises"),
        ("vllm", "qwen3", r"format = 'vllm': vLLM has no EAGLE-1 drafter .*or use --format hf"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_and_nothing_written(kind, policy, says, tmp_path) -> None:
    with pytest.raises(ConfigError, match=says):
        export(tmp_path, FAMILIES[policy], kind)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_wrong_weights_are_named(tmp_path) -> None:
    config = FAMILIES["llama"]
    huge = random_drafter(config)
    huge["fc.weight"][0, 0] = 1e6
    save_drafter(tmp_path / "drafter", EagleConfig.of(config), huge)
    with pytest.raises(CheckpointError, match=r"fc\.weight has values that are not finite in float16"):
        export_drafter(tmp_path / "drafter", tmp_path / "out", "vllm", torch.float16)
    assert not (tmp_path / "out").exists()
    (tmp_path / "config.json").write_text('{"drafter": "medusa"}')
    with pytest.raises(CheckpointError, match="drafter = 'medusa' must be"):
        export_drafter(tmp_path, tmp_path / "out", "hf")


def test_a_drafter_of_a_mixture_of_experts_is_dense() -> None:
    policy = ModelConfig(
        "qwen2_moe", 64, 32, 2, 4, 2, 8, 48, qkv_bias=True, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, moe_layers=(0, 1),
    )  # fmt: skip
    written = _config(policy, "sglang", "float32")
    assert ModelConfig.from_hf(written | {"architectures": ["Qwen2ForCausalLM"]}).num_experts == 0

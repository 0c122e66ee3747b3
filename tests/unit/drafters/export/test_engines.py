"""Exported drafters, read back as each engine reads them, draft what our models draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.drafters.base import FORMATS, Format
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import Eagle3Config, EagleConfig
from megatron_tlt.drafters.eagle.kind import _config
from megatron_tlt.drafters.eagle.pairs import PairLayout
from megatron_tlt.drafters.model import DrafterConfig
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.drafters.training.batching import collate
from megatron_tlt.errors import CheckpointError, ConfigError
from megatron_tlt.models.hf.config import ModelConfig, RopeScaling
from tests.helpers import engine_drafters
from tests.helpers.chat_models import edit_json
from tests.helpers.pairs import block_config
from tests.helpers.tiny_drafters import (
    DEEP,
    FAMILIES,
    LAYERS,
    export_drafter,
    layer_outputs,
    lookup_tables,
    random_drafter,
    random_sequence,
    spread,
)
from tests.helpers.tiny_models import moe_config

STEPS, LENGTH = 4, 20
SCALED = {"rope_theta": 5000.0, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8)}
EAGLE = {
    "llama": FAMILIES["llama"],
    "llama3": replace(FAMILIES["llama"], **SCALED, tie_word_embeddings=True),
    "wide": replace(FAMILIES["llama"], head_dim=24),  # unrelated to hidden size / heads
    "qwen2": FAMILIES["qwen2"],
}
CONFIGS: dict[str, DrafterConfig] = {f"eagle {name}": EagleConfig.of(policy) for name, policy in EAGLE.items()} | {
    "eagle reduced": EagleConfig.of(EAGLE["llama"], 40),
    "eagle3 qwen2": Eagle3Config.of(DEEP["qwen2"]),
    "eagle3 qwen3": Eagle3Config.of(DEEP["qwen3"], draft_vocab_size=40),
    "eagle3 llama": Eagle3Config.of(DEEP["llama"], draft_vocab_size=64),
    "eagle3 llama3": Eagle3Config.of(replace(DEEP["llama"], **SCALED)),
    "eagle3 own layers": Eagle3Config.of(replace(DEEP["qwen3"], tie_word_embeddings=True), (0, 2, 6), 40),
}
ENGINES = {"eagle": engine_drafters.EAGLE, "eagle3": engine_drafters.EAGLE3}
CASES = [(name, engine) for name, config in CONFIGS.items() for engine in ENGINES[config.kind]]


def our_logits(config: DrafterConfig, base: int) -> torch.Tensor:
    """[STEPS, V] of a draft from place `base`; -inf for tokens that the drafter does not know."""
    embed, head = lookup_tables(config.policy)
    model = KINDS[config.kind].build_model(config)
    model.load_full(random_drafter(config).items())
    sequence = random_sequence(config, LENGTH, 5, seed=3)
    batch = collate([sequence])
    with torch.no_grad():
        outputs = model.unroll(embed, batch, PairLayout(batch), STEPS)
        outputs = torch.stack([o[base - sequence.first_base] for o in outputs])
        return spread(model, model.logits(outputs, head))


def engine_logits(engine: engine_drafters.Drafter, config: DrafterConfig, base: int) -> torch.Tensor:
    """The engine collects the layers that it reads from the export."""
    embed, head = lookup_tables(config.policy)
    sequence = random_sequence(config, LENGTH, 5, seed=3)
    features = sequence.hidden
    if config.kind == "eagle3":
        outputs = layer_outputs(config.policy, LENGTH)
        features = torch.cat([outputs[i] for i in engine.aux_layers(LAYERS)], -1)
    return engine_drafters.chain(engine, sequence.token_ids, features, embed, head, base, STEPS)


def export(tmp_path: Path, config: DrafterConfig, kind: Format, dtype: torch.dtype = torch.float32) -> Path:
    save_drafter(tmp_path / "drafter", config, random_drafter(config), policy_version=7, trained_steps=30)
    export_drafter(tmp_path / "drafter", tmp_path / "out", kind, dtype)
    return tmp_path / "out"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_engine_drafts_what_the_model_drafts(kind: Format, name: str, tmp_path) -> None:
    config = CONFIGS[name]
    engine = ENGINES[config.kind][kind](export(tmp_path, config, kind))
    if config.kind == "eagle3":
        assert engine.aux_layers(LAYERS) == list(config.aux_layers)
    for base in (4, 11, 15):
        want = our_logits(config, base)
        scale = float(want[want.isfinite()].abs().max())
        got = engine_logits(engine, config, base)
        if config.kind == "eagle":  # engines draft through the policy's whole head
            assert got.isfinite().all()
            want = torch.where(want.isfinite(), want, got)
        torch.testing.assert_close(got, want, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("eagle qwen2", "sglang"), ("eagle3 qwen3", "trtllm")])
def test_exactly_these_files_of_this_type(name: str, kind: Format, tmp_path) -> None:
    out = export(tmp_path, CONFIGS[name], kind, torch.bfloat16)
    more = ["speculative.json"] if kind == "trtllm" else []
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors", *more]
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    tensors = load_file(out / "model.safetensors")
    assert all(t.dtype == dtypes.get(n, torch.bfloat16) for n, t in tensors.items())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    card = (out / "README.md").read_text()
    assert "has not been run" in card and "| optimizer steps | 30 |" in card


def test_hf_is_a_drafter_directory_with_a_card(tmp_path) -> None:
    config = EagleConfig.of(FAMILIES["qwen3"])
    out = export(tmp_path, config, "hf")
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "drafter.safetensors"]
    saved = load_drafter(out, config.policy)
    assert (saved.policy_version, saved.trained_steps) == (7, 30)
    given = random_drafter(config)
    assert saved.weights.keys() == given.keys()
    assert all(torch.equal(saved.weights[n], given[n]) for n in given)
    assert "a drafter directory of Megatron-TLT" in (out / "README.md").read_text()
    assert {"hf", *ENGINES["eagle3"]} == set(FORMATS)


def of_experts(family: str) -> ModelConfig:
    return replace(moe_config(family, 101), num_layers=LAYERS)


LAYERS_READ = (
    "format = 'vllm': vLLM gives no layer's output of a {} policy: train a drafter of kind eagle, or use .* hf"
)


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        (
            "trtllm",
            EagleConfig.of(FAMILIES["llama"]),
            r"format = 'trtllm': TensorRT-LLM.* runs EAGLE-3 .*or use --format hf or sglang or vllm$",
        ),
        ("sglang", EagleConfig.of(FAMILIES["qwen3"]), "format = 'sglang': SGLang has no EAGLE-1 drafter"),
        ("vllm", EagleConfig.of(FAMILIES["qwen3"]), r"format = 'vllm': vLLM has no EAGLE-1 .*or use --format hf$"),
        ("vllm", Eagle3Config.of(of_experts("mixtral")), LAYERS_READ.format("mixtral")),
        ("vllm", block_config(of_experts("qwen2_moe")), LAYERS_READ.format("qwen2_moe")),
    ],
)
def test_what_an_engine_cannot_run_is_refused_and_nothing_written(kind, config, says, tmp_path) -> None:
    with pytest.raises(ConfigError, match=says):
        export(tmp_path, config, kind)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_vllm_runs_every_kind_for_qwen3_with_experts_but_eagle_for_the_others() -> None:
    policy = of_experts("qwen3_moe")
    for config in (Eagle3Config.of(policy), block_config(policy), EagleConfig.of(of_experts("mixtral"))):
        assert KINDS[config.kind].engine_problem(config, "vllm") is None


EAGLE3_WEIGHTS = random_drafter(CONFIGS["eagle3 qwen3"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"d2t": EAGLE3_WEIGHTS["d2t"] + 1}, r"d2t\[i\] \+ i does not name"),
        ({"d2t": EAGLE3_WEIGHTS["d2t"].int()}, "must be int64 and bool"),
    ],
)
def test_weights_of_another_form_are_not_saved(change: dict, says: str, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=says):
        save_drafter(tmp_path / "x", CONFIGS["eagle3 qwen3"], EAGLE3_WEIGHTS | change)
    assert not (tmp_path / "x").exists()


def test_what_is_no_drafter_is_not_exported(tmp_path) -> None:
    out = export(tmp_path, CONFIGS["eagle3 qwen3"], "hf")
    edit_json(out / "config.json", eagle3_layers=None)
    with pytest.raises(CheckpointError, match="eagle3_layers = None must be a list"):
        export_drafter(out, tmp_path / "x", "hf")
    assert not (tmp_path / "x").exists()


def test_values_beyond_the_type_are_named(tmp_path) -> None:
    config = EagleConfig.of(FAMILIES["llama"])
    huge = random_drafter(config)
    huge["fc.weight"][0, 0] = 1e6
    save_drafter(tmp_path / "drafter", config, huge)
    with pytest.raises(CheckpointError, match=r"fc\.weight has values that are not finite in float16"):
        export_drafter(tmp_path / "drafter", tmp_path / "out", "vllm", torch.float16)
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_a_mixture_of_experts_is_dense() -> None:
    policy = ModelConfig(
        "qwen2_moe", 64, 32, 2, 4, 2, 8, 48, qkv_bias=True, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, moe_layers=(0, 1),
    )  # fmt: skip
    written = _config(policy, "sglang", "float32")
    assert ModelConfig.from_hf(written | {"architectures": ["Qwen2ForCausalLM"]}).num_experts == 0

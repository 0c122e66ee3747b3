"""Exports of the eagle3 drafter, read back as each engine reads them, draft what `Eagle3Model` drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.drafter.batching import collate
from megatron_tlt.drafter.checkpoint import save_drafter
from megatron_tlt.drafter.export.drafter import export_drafter
from megatron_tlt.drafter.kinds.base import FORMATS, Format
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.config import RopeScaling
from megatron_tlt.models.drafters import DrafterConfig
from megatron_tlt.models.eagle.config import Eagle3Config
from megatron_tlt.models.eagle.eagle3 import Eagle3Model
from megatron_tlt.models.eagle.pairs import PairLayout
from tests.helpers import engine_drafters
from tests.helpers.tiny_drafters import lookup_tables, random_drafter
from tests.helpers.tiny_eagle3 import LAYERS, POLICIES, layer_outputs, random_sequence3

STEPS, LENGTH = 4, 20
LLAMA3 = replace(POLICIES["llama"], rope_theta=5000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8))
CONFIGS = {
    "qwen2": Eagle3Config.of(POLICIES["qwen2"]),
    "qwen3": Eagle3Config.of(POLICIES["qwen3"], draft_vocab_size=40),
    "llama": Eagle3Config.of(POLICIES["llama"], draft_vocab_size=64),
    "llama3": Eagle3Config.of(LLAMA3),
    "own layers": Eagle3Config.of(replace(POLICIES["qwen3"], tie_word_embeddings=True), (0, 2, 6), 40),
}
ENGINES = {
    "sglang": engine_drafters.SglangEagle3,
    "trtllm": engine_drafters.TrtllmEagle3,
    "vllm": engine_drafters.VllmEagle3,
}


def our_logits(config: DrafterConfig, base: int) -> torch.Tensor:
    """[STEPS, V] of a draft from place `base`; -inf for tokens that the drafter does not know."""
    embed, _ = lookup_tables(config.policy)
    model = Eagle3Model(config)
    model.load_full(random_drafter(config).items())
    sequence = random_sequence3(config, LENGTH, 5)
    batch = collate([sequence])
    with torch.no_grad():
        outputs = model.unroll(embed, batch, PairLayout(batch), STEPS)
        return model.full_logits(torch.stack([o[base - sequence.first_base] for o in outputs]))


def engine_logits(engine: engine_drafters.Drafter, config: DrafterConfig, base: int) -> torch.Tensor:
    """The engine collects the layers that it reads from the export."""
    embed, head = lookup_tables(config.policy)
    outputs = layer_outputs(config.policy, LENGTH)
    features = torch.cat([outputs[i] for i in engine.aux_layers(LAYERS)], -1)
    tokens = random_sequence3(config, LENGTH, 5).token_ids
    return engine_drafters.chain(engine, tokens, features, embed, head, base, STEPS)


def export(tmp_path: Path, config: DrafterConfig, kind: Format, dtype: torch.dtype = torch.float32) -> Path:
    save_drafter(tmp_path / "drafter", config, random_drafter(config), policy_version=7, trained_steps=30)
    export_drafter(tmp_path / "drafter", tmp_path / "out", kind, dtype)
    return tmp_path / "out"


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    scale = float(want[want.isfinite()].abs().max())
    return torch.allclose(got, want, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_drafts_what_the_model_drafts(kind: Format, name: str, tmp_path) -> None:
    config = CONFIGS[name]
    engine = ENGINES[kind](export(tmp_path, config, kind))
    assert engine.aux_layers(LAYERS) == list(config.aux_layers)
    for base in (4, 11, 15):
        assert close(engine_logits(engine, config, base), our_logits(config, base))


def edit_json(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        raw = json.loads((out / file).read_text())
        change(raw)
        (out / file).write_text(json.dumps(raw))

    return edit


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_exactly_these_tensors_and_files(kind: Format, name: str, tmp_path) -> None:
    config = CONFIGS[name]
    out = export(tmp_path, config, kind, torch.bfloat16)
    more = ["speculative.json"] if kind == "trtllm" else []
    files = sorted(p.name for p in out.iterdir())
    assert files == ["README.md", "config.json", "model.safetensors", *more]
    tensors = load_file(out / "model.safetensors")
    wanted = {f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"}
    wanted |= {f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    wanted |= {f"midlayer.{n}.weight" for n in norms} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(tensors) == wanted | ({"d2t", "t2d"} if config.reduced else set())
    floats = {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")}
    assert floats == {torch.bfloat16}
    if config.reduced:
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    raw = json.loads((out / "config.json").read_text())
    assert (raw["model_type"], raw["draft_vocab_size"]) == ("llama", config.draft_vocab_size)
    assert not {"norm_output", "norm_before_residual", "fc_norm", "target_hidden_size"} & set(raw)
    assert "has not been run" in (out / "README.md").read_text()


def test_what_does_not_fit_is_named(tmp_path) -> None:
    config = CONFIGS["qwen3"]
    given = random_drafter(config)
    with pytest.raises(CheckpointError, match=r"midlayer\.hidden_norm\.weight is missing"):
        save_drafter(tmp_path / "x", config, {n: t for n, t in given.items() if "hidden_norm" not in n})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not part"):
        save_drafter(tmp_path / "x", config, given | {"embed_tokens.weight": torch.zeros(1)})
    with pytest.raises(
        CheckpointError, match=r"fc\.weight has shape \(64, 128\), the policy needs \(64, 192\)"
    ):
        save_drafter(tmp_path / "x", config, given | {"fc.weight": torch.zeros(64, 128)})
    with pytest.raises(CheckpointError, match=r"d2t\[i\] \+ i does not name"):
        save_drafter(tmp_path / "x", config, given | {"d2t": given["d2t"] + 1})
    with pytest.raises(CheckpointError, match="must be int64 and bool"):
        save_drafter(tmp_path / "x", config, given | {"d2t": given["d2t"].int()})
    out = export(tmp_path, config, "hf")
    edit_json("config.json", lambda r: r.update(eagle3_layers=[1, 3, 7]))(out)
    with pytest.raises(CheckpointError, match=r"\[1, 3, 7\]: must be three ascending layers of 0 .. 6"):
        export_drafter(out, tmp_path / "x", "hf")
    edit_json("config.json", lambda r: r.pop("eagle3_layers"))(out)
    with pytest.raises(CheckpointError, match="eagle3_layers = None must be a list"):
        export_drafter(out, tmp_path / "x", "hf")
    assert not (tmp_path / "x").exists()
    assert len(FORMATS) == len(ENGINES) + 1

"""EAGLE-3 drafters in the forms in which others publish them, loaded as ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.checkpoint import load_drafter, save_drafter
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.export.drafter import export_drafter
from megatron_tlt.errors import CheckpointError
from tests.helpers.tiny_drafters import DEEP, random_drafter

POLICY = DEEP["qwen3"]
LAYER = replace(DEEP["llama"], num_kv_heads=2, intermediate_size=72, rope_theta=700.0, rms_norm_eps=1e-5)
SHAPE = Eagle3Config.of(POLICY, (0, 2, 6), 40, LAYER)
WANTED = SpeculationSection(drafter="eagle3")


@pytest.fixture
def ours(tmp_path) -> Path:
    save_drafter(tmp_path / "ours", SHAPE, random_drafter(SHAPE))
    return tmp_path / "ours"


def rewritten(ours: Path, form: str) -> Path:
    """The drafter as SGLang's and vLLM's users, EAGLE's own code and speculators write it."""
    out = ours.parent / form
    export_drafter(ours, out, "vllm" if form in ("vllm", "speculators") else "sglang", torch.float32)
    raw, file = json.loads((out / "config.json").read_text()), out / "model.safetensors"
    tensors = load_file(file) | {"embed_tokens.weight": torch.zeros(101, 64)}
    if form == "eagle":  # no ids: the default; the file of torch.save, without the mask
        del raw["eagle_config"], tensors["t2d"]
        torch.save(tensors, out / "pytorch_model.bin")
        file.unlink()
    else:
        named = {n.replace("midlayer.", "layers.0.") if form == "speculators" else n: t for n, t in tensors.items()}
        save_file(named, file)
    if form == "speculators":
        kept = {k: raw.pop(k) for k in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        layer = raw | {"architectures": ["LlamaForCausalLM"]}
        raw = kept | {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    (out / "config.json").write_text(json.dumps(raw))
    return out


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators", "eagle"])
def test_public_forms_are_read_as_the_drafter_they_hold(ours: Path, form: str) -> None:
    out = rewritten(ours, form)
    wanted = WANTED.model_copy(update={"layers": SHAPE.aux_layers}) if form == "eagle" else WANTED
    saved = load_drafter(out, POLICY, wanted)
    own = random_drafter(SHAPE)
    assert saved.weights.keys() == own.keys()
    assert all(torch.equal(saved.weights[name], tensor) for name, tensor in own.items())
    same = replace(saved.config.layer, eos_token_ids=LAYER.eos_token_ids)
    found = replace(saved.config, layer=replace(same, tie_word_embeddings=SHAPE.layer.tie_word_embeddings))
    assert found == replace(SHAPE, norm_before_residual=form == "speculators")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"eagle_config": {"norm_before_fc": True}}, "with norm_before_fc = True is of a form"),
        ({"fc_norm": True}, "with fc_norm = True is of a form"),
        ({"attention_bias": True}, "with attention_bias = True is of a form"),
        ({"target_hidden_size": 96}, r"hidden size is \[64, 96\]"),
        ({"draft_vocab_size": 41}, "lm_head.weight has shape"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope"),
    ],
)
def test_other_forms_are_refused_by_name(ours: Path, entries: dict, says: str) -> None:
    out = rewritten(ours, "sglang")
    raw = json.loads((out / "config.json").read_text())
    if "rope_scaling" in entries:
        del raw["rope_parameters"]
    (out / "config.json").write_text(json.dumps(raw | entries))
    with pytest.raises(CheckpointError, match=says):
        load_drafter(out, POLICY, WANTED)


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"", r"pytorch_model\.bin cannot be read"),
        (b"\x80\x02", r"pytorch_model\.bin cannot be read"),
        (b"\x80\x02X", r"pytorch_model\.bin cannot be read"),
        ({"model": {"fc.weight": torch.zeros(2)}, "step": 3}, "holds more than tensors by name .*: model, step"),
        ([torch.zeros(2)], "holds a list, not tensors by name"),
    ],
)
def test_a_pickle_of_something_else_is_refused_by_name(ours: Path, contents: object, says: str) -> None:
    file = rewritten(ours, "eagle") / "pytorch_model.bin"
    if isinstance(contents, bytes):
        file.write_bytes(contents)
    else:
        torch.save(contents, file)
    with pytest.raises(CheckpointError, match=says):
        load_drafter(file.parent, POLICY, WANTED)


def test_a_vocabulary_beyond_the_policys_is_refused(ours: Path) -> None:
    out = rewritten(ours, "eagle")
    tensors = torch.load(out / "pytorch_model.bin")
    torch.save(tensors | {"d2t": tensors["d2t"] + POLICY.vocab_size}, out / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="does not name the tokens"):
        load_drafter(out, POLICY, WANTED)

"""EAGLE-3 drafters in the forms in which others publish them, loaded as ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.drafters.checkpoint import load_drafter
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.errors import CheckpointError
from tests.helpers.tiny_drafters import DEEP, published, random_drafter

POLICY = DEEP["qwen3"]
LAYER = replace(DEEP["llama"], num_kv_heads=2, intermediate_size=72, rope_theta=700.0, rms_norm_eps=1e-5)
SHAPE = Eagle3Config.of(POLICY, (0, 2, 6), 40, LAYER)
WANTED = SpeculationSection(drafter="eagle3")


def rewritten(folder: Path, form: str) -> Path:
    """The drafter as SGLang's and vLLM's users, EAGLE's own code and speculators write it."""

    def change(about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.zeros(101, 64)
        if form == "eagle":  # no ids: the default; the mask is left out
            del about["eagle_config"], tensors["t2d"]
        if form == "speculators":
            for name in [name for name in tensors if name.startswith("midlayer.")]:
                tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
            kept = {k: about.pop(k) for k in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
            layer = about | {"architectures": ["LlamaForCausalLM"]}
            about.clear()
            about.update(kept | {"speculators_model_type": "eagle3", "transformer_layer_config": layer})

    out = published(folder, SHAPE, change, "vllm" if form in ("vllm", "speculators") else "sglang")
    if form == "eagle":
        torch.save(load_file(out / "model.safetensors"), out / "pytorch_model.bin")
        (out / "model.safetensors").unlink()
    return out


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators", "eagle"])
def test_public_forms_are_read_as_the_drafter_they_hold(tmp_path: Path, form: str) -> None:
    out = rewritten(tmp_path, form)
    wanted = WANTED.model_copy(update={"layers": SHAPE.aux_layers}) if form == "eagle" else WANTED
    saved = load_drafter(out, POLICY, wanted)
    own = random_drafter(SHAPE)
    assert saved.weights.keys() == own.keys()
    assert all(torch.equal(saved.weights[name], tensor) for name, tensor in own.items())
    same = replace(saved.config.layer, eos_token_ids=LAYER.eos_token_ids)
    found = replace(saved.config, layer=replace(same, tie_word_embeddings=SHAPE.layer.tie_word_embeddings))
    assert found == replace(SHAPE, norm_before_residual=form == "speculators")


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
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path: Path, contents: object, says: str) -> None:
    file = rewritten(tmp_path, "eagle") / "pytorch_model.bin"
    if isinstance(contents, bytes):
        file.write_bytes(contents)
    else:
        torch.save(contents, file)
    with pytest.raises(CheckpointError, match=says):
        load_drafter(file.parent, POLICY, WANTED)


def test_a_vocabulary_beyond_the_policys_is_refused(tmp_path: Path) -> None:
    out = rewritten(tmp_path, "eagle")
    tensors = torch.load(out / "pytorch_model.bin")
    torch.save(tensors | {"d2t": tensors["d2t"] + POLICY.vocab_size}, out / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="does not name the tokens"):
        load_drafter(out, POLICY, WANTED)

"""Published drafters as users have them: tables of their own, layer ids, unknown entries, quantized files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_tlt.cli.drafter import _load
from megatron_tlt.cli.generate import _checked_tokenizer
from megatron_tlt.cli.main import _parser
from megatron_tlt.config.load import build_config
from megatron_tlt.config.rollout import RolloutSection
from megatron_tlt.config.root import Config
from megatron_tlt.config.speculation import SpeculationSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.drafters.checkpoint import drafter_problems, drafter_warnings, load_drafter
from megatron_tlt.drafters.dspark.config import BlockConfig
from megatron_tlt.drafters.eagle.config import Eagle3Config
from megatron_tlt.drafters.registry import KINDS
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import EMBED, HEAD
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.chat_models import save_letters
from tests.helpers.tiny_drafters import DEEP, published
from tests.helpers.tiny_models import random_weights

POLICY = DEEP["llama"]
IDS = "eagle_aux_hidden_state_layer_ids"
SHAPES = {"eagle3": Eagle3Config.of(POLICY, (0, 2, 6), 40), "dspark": BlockConfig.fresh(POLICY, (0, 2, 6))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", POLICY, random_weights(POLICY, 0), dtype=torch.bfloat16)
    return tmp_path / "model"


def problems(kind: str, drafter: Path, model: Path, **more: Any) -> str:
    section = SpeculationSection(drafter=kind, drafter_path=str(drafter), **more)
    return "\n".join(str(problem) for problem in drafter_problems(section, POLICY, model))


@pytest.mark.parametrize(
    ("kind", "name", "table"),
    [
        ("eagle3", "embed_tokens.weight", EMBED),
        ("dspark", "embed_tokens.weight", EMBED),
        ("dspark", "model.lm_head.weight", HEAD),
        ("dspark", "verifier_norm.weight", "model.norm.weight"),
    ],
)
def test_tables_of_its_own_are_refused_and_copies_of_the_policys_are_not(
    tmp_path: Path, model: Path, kind: str, name: str, table: str
) -> None:
    theirs = load_file(model / "model.safetensors")[table]
    copy = published(tmp_path, SHAPES[kind], lambda _, tensors: tensors.update({name: theirs.half()}))
    assert problems(kind, copy, model) == ""
    section = SpeculationSection(drafter=kind, drafter_path=str(copy))
    assert not any("not checked" in text for text in drafter_warnings(section, POLICY))
    own = published(tmp_path, SHAPES[kind], lambda _, tensors: tensors.update({name: theirs * 1.05}))
    said = problems(kind, own, model)
    assert f"{name.removeprefix('model.')} is not the {table} of {model}" in said and "allow_other_policy" in said
    assert problems(kind, own, model, allow_other_policy=True) == ""
    wide = published(tmp_path, SHAPES[kind], lambda _, tensors: tensors.update({name: theirs[:-1]}))
    assert "has shape" in problems(kind, wide, model)


@pytest.mark.parametrize("ids", [None, [], "absent"])
def test_layer_ids_that_are_not_named_are_the_engines_default_with_a_warning(tmp_path: Path, ids: Any) -> None:
    def change(about: dict[str, Any], _: dict[str, Tensor]) -> None:
        about["eagle_config"] = {"use_aux_hidden_state": True} | ({} if ids == "absent" else {IDS: ids})

    out = published(tmp_path, SHAPES["eagle3"], change)
    section = SpeculationSection(drafter="eagle3", drafter_path=str(out))
    assert load_drafter(out, POLICY, section).config.aux_layers == (1, 3, 4)  # 1, L/2 - 1, L - 4
    assert f"has no {IDS}: the outputs of layers [1, 3, 4]" in drafter_warnings(section, POLICY)[0]
    chosen = section.model_copy(update={"layers": (0, 2, 6)})
    assert load_drafter(out, POLICY, chosen).config.aux_layers == (0, 2, 6)
    assert not any(IDS in text for text in drafter_warnings(chosen, POLICY))


EAGLE3_ENTRIES = [
    ({"eagle_config": {IDS: "0,2,6"}}, f"{IDS} = '0,2,6' must be a list of integers"),
    ({"eagle_config": {IDS: [0, True, 6]}}, "must be a list of integers"),
    ({"eagle_config": {IDS: [0, 2, 7]}}, f"config.json: {IDS}: must be three ascending layers of 0 .. 6"),
    ({"eagle_config": {IDS: [0, 2, 6]}, IDS: [0, 2, 6]}, f"{IDS} names different layers"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm = True"),
    ({"eagle_config": {"later_norm": "rms"}}, "eagle_config has entries that are not known here: later_norm"),
    ({"norm_before_residual": "false"}, "norm_before_residual = 'false' must be true or false"),
    ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architectures = .'Eagle3DeepseekV2ForCausalLM'"),
    ({"draft_vocab_size": None}, "config.json and weights disagree: draft_vocab_size"),
    ({"draft_vocab_size": "40"}, "draft_vocab_size = '40' must be an integer"),
    ({"eagle_config": "llama"}, "eagle_config = 'llama' must be an object"),
    ({"eagle_config": {"next_layer_regular": False}}, "next_layer_regular = False"),
    ({"logits_scaling": 8.0}, "logits_scaling = 8.0: is not computed here"),
    ({"eagle_config": {"norm_before_fc": True}}, "with norm_before_fc = True is of a form"),
    ({"fc_norm": True}, "with fc_norm = True is of a form"),
    ({"attention_bias": True}, "with attention_bias = True is of a form"),
    ({"target_hidden_size": 96}, r"hidden size is \[64, 96\]"),
    ({"draft_vocab_size": 41}, "lm_head.weight has shape"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "rope_type"),
]
BLOCK_ENTRIES = [
    ({"target_layer_ids": "0,2,6"}, "target_layer_ids = '0,2,6' must be a list of integers"),
    ({"target_layer_ids": []}, "names no target_layer_ids: rollout.speculation.layers says"),
    ({"target_layer_ids": None}, "names no target_layer_ids"),
    ({"aux_hidden_state_layer_ids": [0, 2, 6]}, "aux_hidden_state_layer_ids name"),
    ({"block_size": "8"}, "block_size = '8' must be an integer"),
    ({"model_type": "gpt_oss"}, "model_type = 'gpt_oss'"),
    ({"dflash_config": {"projector_type": "domino"}}, "projector_type = 'domino'"),
    ({"dflash_config": {"attention_mode": "mla"}}, "attention_mode = 'mla'"),
    ({"dflash_config": {"shift_label": False}}, "sample_from_anchor and shift_label differ"),
    ({"dflash_config": [8]}, "dflash_config = .8. must be an object"),
    ({"sample_from_anchor": "false"}, "sample_from_anchor = 'false' must be true or false"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0: is not computed here"),
    ({"dflash_config": {"gate": 2}}, "dflash_config has entries that are not known here: gate = 2"),
]


@pytest.mark.parametrize(
    ("kind", "entries", "says"),
    [(kind, *row) for kind, rows in (("eagle3", EAGLE3_ENTRIES), ("dspark", BLOCK_ENTRIES)) for row in rows],
)
def test_entries_that_are_wrong_or_not_known_are_refused_by_name(
    tmp_path: Path, kind: str, entries: dict[str, Any], says: str
) -> None:
    out = published(tmp_path, SHAPES[kind], lambda about, _: about.update(entries))
    with pytest.raises(CheckpointError, match=says):
        load_drafter(out, POLICY, SpeculationSection(drafter=kind))


_MODELOPT = {IDS: [0, 2, 6], "next_layer_regular": True, "parallel_draft_step": 1, "use_mtp_layernorm": False}
_HEADS = {"markov_head_type": "vanilla", "projector_type": "dspark", "confidence_head_alpha": 1.0}


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("eagle3", {"eagle_config": _MODELOPT | {"use_last_layernorm": True, "parallel_draft_heads_num_layers": None}}),
        ("eagle3", {"max_window_layers": 48, "use_sliding_window": False, "attention_dropout": 0.0, "mlp_bias": None}),
        ("eagle3", {"auto_map": {"": "a.B"}, "speculators_config": {"algorithm": "eagle3"}, "norm_before_fc": False}),
        ("dspark", {"dflash_config": _HEADS | {"attention_mode": "gqa", "num_target_layers": 8}}),  # SpecForge
        ("dspark", {"dflash_config": _HEADS | {"shift_label": True, "use_confidence_head": True, "causal": False}}),
        ("dspark", {"architectures": ["DFlashDraftModel"], "dflash_config": _HEADS, "sample_from_anchor": None}),
    ],
)
def test_entries_of_other_programs_files_change_nothing(tmp_path: Path, kind: str, entries: dict[str, Any]) -> None:
    section = SpeculationSection(drafter=kind)
    plain = load_drafter(published(tmp_path, SHAPES[kind], lambda *_: None), POLICY, section)
    other = load_drafter(published(tmp_path, SHAPES[kind], lambda about, _: about.update(entries)), POLICY, section)
    assert other.config == plain.config


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_tensors_are_refused_by_type(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].to(dtype)

    with pytest.raises(CheckpointError, match=f"must be fp32, fp16 or bf16: fc.weight is {dtype}"):
        load_drafter(published(tmp_path, SHAPES[kind], change), POLICY, SpeculationSection(drafter=kind))


def test_a_confidence_head_is_named_as_not_read(tmp_path: Path) -> None:
    head = {"confidence_head.proj.weight": torch.ones(1, 64)}
    out = published(tmp_path, SHAPES["dspark"], lambda _, tensors: tensors.update(head))
    section = SpeculationSection(drafter="dspark", drafter_path=str(out))
    assert "its confidence head is not read" in drafter_warnings(section, POLICY)[0]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("own", "written"), [(16, POLICY.max_position_embeddings), (4096, 4096)])
def test_a_drafter_of_short_sequences_drafts_as_far_as_the_policy_goes(
    tmp_path: Path, kind: str, own: int, written: int
) -> None:
    """vLLM drafts nothing behind the drafter's max_position_embeddings."""
    out = published(tmp_path, SHAPES[kind], lambda about, _: about.update(max_position_embeddings=own))
    drafter = load_drafter(out, POLICY, SpeculationSection(drafter=kind))
    files = KINDS[kind].vllm_files(drafter.config, drafter.weights, torch.float32)
    assert files.json["config.json"]["max_position_embeddings"] == written


@pytest.mark.parametrize("command", ["drafter eval --drafter", "generate"])
def test_a_guess_is_logged_once_by_commands_without_check(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    save_letters(model)
    out = published(tmp_path, SHAPES["eagle3"], lambda about, _: about.pop("eagle_config"))
    section, world = SpeculationSection(drafter="eagle3", drafter_path=str(out)), SingleProcess()
    if command == "generate":
        (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
        arguments = ["generate", "--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "o")]
        field = "rollout.speculation.drafter_path"
        _checked_tokenizer(_parser().parse_args(arguments), RolloutSection(speculation=section), None, world)
    else:
        field = "--drafter"
        config = build_config({"model": {"path": str(model)}}, (), Config)
        _load(out, config, section.model_copy(update={"drafter_path": None}), world, may_be_other=True)
    (said,) = [text for text in caplog.messages if IDS in text]
    assert said.startswith(f"{field} = {out}: has no {IDS}: the outputs of layers [1, 3, 4]")

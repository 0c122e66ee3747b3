"""Exported directories hold one tokenizer whole: that of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer, GenerationConfig

from megatron_tlt.checkpoint.companions import copy_companions, copy_run_companions
from megatron_tlt.data.hub import _COMPANIONS, _OTHER_FORMS
from megatron_tlt.data.tokenizer import HFTokenizer
from megatron_tlt.models.hf.config import ModelConfig

DEMO = Path("assets/demo-policy")
MESSAGES = [{"role": "user", "content": "Calculate 7 + 5."}]


def with_template_in_its_configuration(folder: Path) -> Path:
    """The demo tokenizer as older versions of transformers write it: the template is no file, and it is another one."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    values |= {"chat_template": template, "eos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def with_more_templates(folder: Path) -> Path:
    shutil.copytree(DEMO, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages[0].content }}!")
    return folder


def test_an_export_has_the_runs_tokenizer_and_nothing_of_the_models(tmp_path: Path) -> None:
    model, own = with_more_templates(tmp_path / "model"), with_template_in_its_configuration(tmp_path / "own")
    (own / "generation_config.json").write_text('{"eos_token_id": 1, "max_new_tokens": 7}')
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 3]}))
    (tmp_path / "out").mkdir()
    copy_run_companions(model, own, tmp_path / "out")
    exported, trained = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(own)
    assert exported.chat_template == trained.chat_template
    assert exported.apply_chat_template(MESSAGES, tokenize=False) == "Q: Calculate 7 + 5.\nA:"
    assert exported.eos_token == "<|bos|>"
    written = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (ModelConfig.from_hf(model).eos_token_ids, HFTokenizer(own).eos_token_ids) == ((2,), (1,))
    assert written.eos_token_id == [1, 2, 3]  # engines stop at all
    assert written.max_new_tokens == 512  # the model's


def test_templates_go_along_and_those_of_another_tokenizer_leave(tmp_path: Path) -> None:
    first, second = with_more_templates(tmp_path / "a"), with_template_in_its_configuration(tmp_path / "b")
    (tmp_path / "out").mkdir()
    copy_companions(first, tmp_path / "out")
    templates = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert templates["tool_use"] == "{{ messages[0].content }}!"
    copy_companions(second, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template.startswith("{% for m in messages %}Q")


def test_more_templates_come_from_the_hub_too_and_weights_in_other_forms_do_not() -> None:
    files = ["config.json", "additional_chat_templates/tool_use.jinja", "onnx/config.json", "adapter/config.json"]
    files += ["assets/a.txt", "original/tokenizer.model", "consolidated.json", "chat_template.jinja"]
    found = filter_repo_objects(files, allow_patterns=[*_COMPANIONS], ignore_patterns=[*_OTHER_FORMS])
    assert [*found] == ["config.json", "additional_chat_templates/tool_use.jinja", "chat_template.jinja"]

"""Teachers that cannot score the policy are found before a run."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.writer import save_hf
from megatron_tlt.trainer.preflight import check_report
from megatron_tlt.trainer.teacher import with_teacher_shape
from tests.helpers.chat_models import edit_json
from tests.helpers.mpi import ROOT
from tests.helpers.tiny_models import random_weights

POLICY = ROOT / "assets/demo-policy"
SHAPE = ModelConfig("qwen3", 288, 32, 2, 2, 1, 16, 48, qk_norm=True, max_position_embeddings=1024, eos_token_ids=(2,))


def make_teacher(folder: Path) -> Path:
    save_hf(folder, SHAPE, random_weights(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((POLICY / name).read_bytes())
    return folder


def config_of(teacher: Path) -> Config:
    tree = {
        "model": {"path": str(POLICY), "max_context": 1024},
        "rollout": {"max_tokens": 448},
        "algorithm": {"name": "distill", "teacher": str(teacher)},
        "data": {"train": {"tasks": [{"name": "chain_sum"}]}, "max_prompt_tokens": 192},
        "cluster": {"ranks_per_node": 2},
    }
    return Config.model_validate(tree)


def change_tokenizer(folder: Path, added: bool) -> None:
    """Adds a token to the tokenizer, or gives two tokens each other's ids."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    if added:
        tokenizer.add_tokens(["<think>"])
        tokenizer.save(str(path))
        return
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tree))


def test_a_teacher_of_other_sizes_is_taken_and_planned(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path)
    change_tokenizer(teacher, added=True)  # a token that the policy does not have is allowed
    report = check_report(config_of(teacher), 2, all_rows=True)
    (row,) = [line.split() for line in report.splitlines() if line.startswith("  teacher ")]
    assert row[1] == "0.00" and "warning" not in report
    named = with_teacher_shape(config_of(Path("on/the-hub")), str(teacher)).algorithm.teacher_shape
    assert named == ModelConfig.from_hf(teacher).architecture, "of the config.json that `check` fetches"
    missing = check_report(config_of(Path("not/here/at/all")), 2, elsewhere=True)
    assert "not on this machine: algorithm.teacher" in missing and "lacks the teacher" in missing


def another_vocabulary(folder: Path) -> None:
    change_tokenizer(folder, added=False)


def few_positions(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=512)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (another_vocabulary, "2 of its 281 tokens differ, the first is 'a' with id"),
        (few_positions, "has 512 positions, fewer than model.max_context (1024)"),
    ],
)
def test_a_wrong_teacher_is_refused(tmp_path: Path, damage, text: str) -> None:
    teacher = make_teacher(tmp_path)
    damage(teacher)
    with pytest.raises(ConfigError) as caught:
        check_report(config_of(teacher), 2)
    assert [problem.path for problem in caught.value.problems] == ["algorithm.teacher"]
    assert text in str(caught.value)

"""Converted checkpoints under megatron itself: a run starts from one, and what megatron writes converts back."""

from __future__ import annotations

import json
from argparse import Namespace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_tlt.actor.hf_names import adapter_slots
from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.convert.to_hf import HfConversion
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.checkpoint.export import write_adapter, write_run
from megatron_tlt.config.actor import LoraSection
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.errors import CheckpointError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.peft import peft_problems
from megatron_tlt.models.hf.writer import save_hf
from tests.helpers.mpi import run_ranks
from tests.mpi.workers.actor_common import KINDS, LORA, MOE_KINDS, results, save_model

pytestmark = pytest.mark.ci

# A run pads their rows to a multiple of its TP; the converter stores the model's.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
WORKER = "tests/mpi/workers/actor_checkpoint.py"
EVERY = (*KINDS, *MOE_KINDS)


def at(kind: str, tp: int = 2, **layout: Any) -> str:
    """A layout of the worker, in words without spaces."""
    return json.dumps({"model": kind, "tp": tp, **layout}, separators=(",", ":"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of each family, each converted."""
    place = tmp_path_factory.mktemp("convert")
    for kind in EVERY:
        save_model(kind, place / kind)
        MegatronConversion.plan(place / kind, None).write(place / f"{kind}-mg", SingleProcess())
    return place


@pytest.fixture(scope="module")
def four_ranks(root: Path) -> list[dict[str, Any]]:
    """Everything that needs four ranks, in one launch."""
    damaged = root / "damaged"
    MegatronConversion.plan(root / "qwen3", None).write(damaged, SingleProcess())
    shard = damaged / "release" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    spoiled = root / "spoiled"  # as another program's, with an argument of a class that is not known
    MegatronConversion.plan(root / "qwen3", None).write(spoiled, SingleProcess())
    (spoiled / "release/manifest.json").unlink()
    torch.save({"args": Namespace(status=HTTPStatus.OK)}, spoiled / "release/common.pt")
    commands = [
        *(f"start {root}/{kind}-mg {at(kind, pp=2)}" for kind in KINDS),
        f"start {root}/qwen2-mg {at('qwen2', tp=4)}",
        f"start {root}/qwen3-mg {at('qwen3', sequence_parallel=True)}",
        f"start {root}/llama-mg {at('llama', pp=2, dtype='bf16')}",
        f"start {root}/damaged {at('qwen3', pp=2)}",
        f"start {root}/llama-mg {at('qwen3', pp=2)}",
        *(f"once {root}/run-{kind} {at(kind, pp=2)}" for kind in KINDS),
        *(f"once {root}/run-{kind} {at(kind, tp=1, pp=2, ep=2)}" for kind in MOE_KINDS),
        f"once {root}/run-lora {at('qwen2_moe', tp=1, pp=2, ep=2, lora=LORA)}",
        f"once {root}/run-lora-dense {at('qwen3', pp=2, lora=LORA)}",
        f"foreign {root}/each {at('qwen2', pp=2, flags={'non_homogeneous_layers': True})}",
        f"start {root}/each {at('qwen2', pp=2)}",
        f"start {spoiled} {at('qwen3', pp=2)}",
        *(f"start {root}/{kind}-mg {at(kind, tp=1, pp=2, ep=2)}" for kind in MOE_KINDS),
    ]
    return results(run_ranks(4, WORKER, str(root), " + ".join(commands)).stdout)


def starts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in found if r["case"] == "start"]


@pytest.mark.parametrize("which", [0, 1, 2, 3, 4, 5, 8, 10, 11])
def test_a_start_from_megatron_equals_one_from_hugging_face_bit_for_bit(
    four_ranks: list[dict[str, Any]], which: int
) -> None:
    found = starts(four_ranks)[which]
    assert "error" not in found, found
    assert found["same_start"] and found["same_loss"] and found["same_after"], found
    assert found["grad_norm"] > 0
    # A bf16 norm weight may round back to where it was; in fp32 every tensor moves.
    assert found["moved"] or which == 5


def test_damage_and_another_model_are_refused(four_ranks: list[dict[str, Any]]) -> None:
    damaged, other = starts(four_ranks)[6], starts(four_ranks)[7]
    assert "__0_0.distcp was altered" in damaged["error"]
    assert "of another model: family is 'llama', not 'qwen3'" in other["error"]
    assert "holds more than numbers" in starts(four_ranks)[9]["error"]


@pytest.mark.parametrize("kind", EVERY)
def test_keys_and_shapes_are_those_that_megatron_writes(
    four_ranks: list[dict[str, Any]], root: Path, kind: str
) -> None:
    run, mine = TorchDistReader(root / f"run-{kind}"), TorchDistReader(root / f"{kind}-mg")

    def weights(source: TorchDistReader) -> dict[str, Any]:
        return {
            key: (tuple(stored.size)[len(stored.size) - 1 if key in VOCABULARY else 0 :], stored.properties.dtype)
            for key, stored in source.tensors.items()
            if not key.startswith("optimizer.")
        }

    def objects(source: TorchDistReader) -> set[str]:
        return {k for k in source.metadata.state_dict_metadata if "_extra_state" in k}

    assert weights(run) == weights(mine)
    assert objects(run) <= objects(mine) and objects(run)  # Transformer Engine's norms have some, too


@pytest.mark.parametrize("kind", EVERY)
def test_a_runs_checkpoint_is_exported_bit_for_bit(
    four_ranks: list[dict[str, Any]], root: Path, kind: str, tmp_path: Path
) -> None:
    """The file is the one that the live policy's tensors give."""
    section = ModelSection(path=str(root / kind), max_context=512)
    said = write_run(root / f"run-{kind}/step-000001", SingleProcess(), section, tmp_path / "hf", "fp32")
    assert said == "policy version 1"
    wanted = torch.load(root / f"run-{kind}" / "after.pt")
    save_hf(tmp_path / "live", ModelConfig.from_hf(root / kind), wanted.items())
    found, live = (tmp_path / name / "model.safetensors" for name in ("hf", "live"))
    assert found.read_bytes() == live.read_bytes()


def test_adapters_are_exported_merged_and_as_peft_reads_them(
    four_ranks: list[dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    """The PEFT directory merged by hand, by PEFT's formula, is the merged export; a run starts from it; each refuses
    another configuration."""
    section, lora = ModelSection(path=str(root / "qwen2_moe"), max_context=512), LoraSection(**LORA)
    given = root / "run-lora/step-000001", SingleProcess(), section
    write_run(*given, tmp_path / "hf", "fp32", lora=lora)
    for overwrite in (False, True):
        write_adapter(*given, tmp_path / "adapter", "fp32", lora, overwrite)
    merged = load_file(tmp_path / "hf/model.safetensors")
    config, live = ModelConfig.from_hf(root / "qwen2_moe"), torch.load(root / "run-lora/after.pt")
    save_hf(tmp_path / "live", config, live.items())
    base, served = (load_file(folder / "model.safetensors") for folder in (root / "qwen2_moe", tmp_path / "live"))
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    changed = set()
    for name in (name for name in factors if ".lora_A." in name):
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        change = said["lora_alpha"] / said["r"] * factors[name.replace("lora_A", "lora_B")] @ factors[name]
        torch.testing.assert_close(merged[weight], base[weight] + change, atol=1e-7, rtol=1e-6)
        changed.add(weight)
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert changed == {name for name in base if not torch.equal(merged[name], base[name])}
    for name, tensor in served.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-7, rtol=1e-6)

    shapes = {slot.hf_names[0]: shape for slot, shape in adapter_slots(config, lora, 1).items()}
    again = lora.model_copy(update={"adapter_path": str(tmp_path / "adapter")})
    assert not peft_problems(again, config, shapes)
    other = again.model_copy(update={"alpha": 3.0})
    assert "actor.lora.alpha = 3.0: must be 8, lora_alpha of" in str(peft_problems(other, config, shapes)[0])
    with pytest.raises(CheckpointError, match=r"lora is 'rank 4, alpha 8, .*', not 'rank 4, alpha 3"):
        write_run(*given, tmp_path / "other", "fp32", lora=other)
    save_hf(tmp_path / "tuned", config, ((name, 2 * tensor) for name, tensor in iter_weights(section.path)))
    tuned = ModelSection(path=str(tmp_path / "tuned"), max_context=512)
    own = ModelSection(path=str(tmp_path / "hf"), max_context=512)  # the adapters would be merged twice
    for wrong in (tuned, own):
        with pytest.raises(CheckpointError, match=r"does not fit this run: base is '[\w-]{33}', not '[\w-]{33}'"):
            write_adapter(*given[:2], wrong, tmp_path / "other", "fp32", lora)
    with pytest.raises(CheckpointError, match="holds adapters and no weights"):
        write_run(*given, tmp_path / "other", "fp32")


def test_peft_gives_the_merged_models_logits(four_ranks: list[dict[str, Any]], root: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    section, lora = ModelSection(path=str(root / "qwen3"), max_context=512), LoraSection(**LORA)
    given = root / "run-lora-dense/step-000001", SingleProcess(), section
    write_run(*given, tmp_path / "hf", "fp32", lora=lora)
    write_adapter(*given, tmp_path / "adapter", "fp32", lora)
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (root / "qwen3", tmp_path / "hf"))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        torch.testing.assert_close(found, merged(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, AutoModelForCausalLM.from_pretrained(root / "qwen3")(ids).logits, atol=1e-3)


def test_tensors_of_each_layer_apart_convert_too(four_ranks: list[dict[str, Any]], root: Path, tmp_path: Path) -> None:
    assert any(".layers.0." in key for key in TorchDistReader(root / "each").weight_keys())
    HfConversion.plan(root / "each", None, config=root / "qwen2").write(tmp_path / "hf", SingleProcess())
    found = dict(iter_weights(tmp_path / "hf"))
    assert all(torch.equal(found[name], tensor) for name, tensor in iter_weights(root / "qwen2"))


@pytest.mark.nightly
def test_three_ranks_convert_as_one_does(root: Path, tmp_path: Path) -> None:
    tools = {"there": "tools/convert_hf_to_megatron.py", "back": "tools/convert_megatron_to_hf.py"}
    hf, out, back = str(root / "llama"), str(tmp_path / "mg"), str(tmp_path / "hf")
    said = run_ranks(3, tools["there"], "--hf", hf, "--out", out).stdout
    assert said.count("wrote") == 1 and len(list((tmp_path / "mg" / "release").glob("*.distcp"))) == 3
    run_ranks(3, tools["back"], "--megatron", out, "--out", back, "--max-file-gib", "0.0001")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    found = dict(iter_weights(tmp_path / "hf"))
    assert all(torch.equal(found[name], tensor) for name, tensor in iter_weights(root / "llama"))
    refused = run_ranks(3, tools["there"], "--hf", hf, "--out", out, check=False)
    assert refused.returncode == 2 and refused.stdout.count("exists: --overwrite replaces it") == 1
    with (tmp_path / "mg/release/__2_0.distcp").open("r+b") as shard:
        shard.seek(-1, 2)
        shard.write(b"?")
    refused = run_ranks(3, tools["back"], "--megatron", out, "--out", back + "2", check=False)
    assert refused.returncode == 2 and "__2_0.distcp was altered" in refused.stdout

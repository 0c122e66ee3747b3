"""The layers of `actor.layer_spec: transformer_engine` against the local ones, on two ranks.

Over a stand-in (tests/helpers/te_cpu) that computes in PyTorch: wiring, names, sharding, gradients, checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_tlt.actor.torch_dist_reader import TorchDistReader
from megatron_tlt.checkpoint.convert.to_megatron import MegatronConversion
from megatron_tlt.checkpoint.export import write_run
from megatron_tlt.config.model import ModelSection
from megatron_tlt.distributed.together import SingleProcess
from megatron_tlt.models.hf.loader import iter_weights
from tests.helpers.mpi import ROOT, run_ranks
from tests.mpi.workers.actor_common import LORA_KINDS, results, save_model
from tests.numerics.actor_expected import write_expected

pytestmark = pytest.mark.ci

SP = {"tp": 2, "sequence_parallel": True}
# Biases, an untied head, norms of queries and keys, experts with and without shared ones: each where it is hard.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tp": ({"tp": 2, "micro_batch_tokens": 96}, "qwen3", "sgd"),
    "sp, selective recompute": ({**SP, "recompute": "selective"}, "qwen2", "sgd"),
    "pp, full recompute": ({"pp": 2, "recompute": "full"}, "llama", "sgd"),
    "cp": ({"cp": 2}, "qwen3", "gspo"),
    "zero, overlap": ({"distributed_optimizer": "on", "overlap": "on", "micro_batch_tokens": 96}, "qwen3", "adam"),
    "lora": ({**SP, "recompute": "full"}, "qwen2", "lora"),
    "experts": ({**SP, "ep": 2, "recompute": "selective"}, "qwen2_moe", "sgd"),
    "experts, lora": ({"ep": 2}, "qwen2_moe", "lora"),
}
# Names of the layer's parts: norms that are recomputed are modules, the router reads one, adapters are megatron's own.
FUSED = "TEDotProductAttention TELayerNormColumnParallelLinear TERowParallelLinear"
APART = "TEColumnParallelLinear TEDotProductAttention TERowParallelLinear"
MODULES = {"sp, selective recompute": APART, "experts": APART}
MODULES |= {"lora": "TEDotProductAttention", "experts, lora": "TEDotProductAttention"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("te")
    for kind in ("qwen3", "llama"):
        save_model(kind, place / kind)
    for kind in LORA_KINDS:
        write_expected(place, kind)
    (place / "runs").mkdir()
    for kind in ("qwen3", "qwen2_moe"):
        MegatronConversion.plan(place / kind, None).write(place / "runs" / f"{kind}-mg", SingleProcess())
    return place


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    worker, stand_in = "tests/mpi/workers/te_layers.py", ROOT / "tests/helpers/te_cpu"
    arguments = (str(root), str(root / "runs"), json.dumps(list(CASES.values())))
    return results(run_ranks(2, worker, *arguments, first_path=stand_in).stdout)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_equal_the_local_layers(found: list[dict[str, Any]], name: str) -> None:
    layout, kind, variant = CASES[name]
    wanted = {"case": "layers", "layout": layout, "kind": kind, "variant": variant}
    outcome = next(r for r in found if wanted.items() <= r.items())
    errors = outcome["errors"]
    assert errors.pop("logprobs") <= 1e-4
    if variant == "adam":  # it divides by sqrt(v): where a gradient is rounding noise, its sign is the update
        assert errors.pop("weights") <= 2e-4
    assert len(errors) >= 2 and all(error <= 1e-5 for error in errors.values()), errors
    assert " ".join(outcome["modules"]) == MODULES.get(name, FUSED)
    assert outcome["norms"] == (MODULES.get(name) == APART), "the update recomputes them"
    assert outcome["recomputed"] == 0, "passes without gradients must not lengthen Transformer Engine's list"


def test_checkpoints_pass_between_the_layers_and_layouts(found: list[dict[str, Any]]) -> None:
    same, *others = loads = [r for r in found if r["case"] == "load"]
    assert len(loads) == 5
    assert same["same_bits"] and same["grad_norm"] == 0.0
    for loaded in others:
        assert loaded["weights"] <= 1e-5 and loaded["grad_norm"] <= 1e-5 and loaded["version"] == 3, loaded


def test_a_start_from_megatron_equals_one_from_hugging_face(found: list[dict[str, Any]]) -> None:
    (outcome,) = [r for r in found if r["case"] == "start"]
    assert outcome["same_start"] and outcome["same_loss"] and outcome["same_after"] and outcome["moved"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_moe"])
def test_a_converted_checkpoint_has_what_these_layers_ask_for(found: list[dict[str, Any]], kind: str) -> None:
    """As Megatron-LM asks, which wants every extra state, also of the norms."""
    (outcome,) = [r for r in found if r["case"] == "converted" and r["kind"] == kind]
    assert outcome["error"] == "" and outcome["states"] > 10
    # The attention's own is in no checkpoint: Transformer Engine leaves it out of what a load misses.
    assert {name.split(".")[-2] for name in outcome["missing"]} == {"core_attention"}


@pytest.mark.parametrize(("run", "kind"), [("dense", "qwen3"), ("mixed", "qwen2_moe")])
def test_a_runs_checkpoint_exports_bit_for_bit(
    found: list[dict[str, Any]], root: Path, run: str, kind: str, tmp_path: Path
) -> None:
    written, mine = TorchDistReader(root / "runs" / run), TorchDistReader(root / "runs" / f"{kind}-mg")
    assert set(written.weight_keys()) == set(mine.weight_keys())
    states = [{k for k in r.metadata.state_dict_metadata if "_extra_state" in k} for r in (written, mine)]
    assert states[0] >= states[1] and all("._extra_state/shard_" in key for key in states[0])
    section = ModelSection(path=str(root / kind), max_context=512)
    write_run(root / "runs" / run / "step-000001", SingleProcess(), section, tmp_path / "hf", "fp32")
    wanted, exported = torch.load(root / "runs" / run / "after.pt"), dict(iter_weights(tmp_path / "hf"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items()) and wanted

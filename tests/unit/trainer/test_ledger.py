"""Every recipe on a GPU that is a ledger: the real build order, a step, a save and a resume, with shapes only.

What the ledger saw in each phase is what the memory plan says, and never more than the GPU has. The engine, its cache,
drafter and drafter training, offload and push are the real ones on the meta device; the policy is `ShapePolicy`.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_tlt.actor import logprob, offload, weights
from megatron_tlt.backends import build
from megatron_tlt.backends.embedded import EmbeddedBackend
from megatron_tlt.config.drafter import DrafterSection
from megatron_tlt.config.load import load_config
from megatron_tlt.config.planning.engine import verified_rows
from megatron_tlt.config.planning.memory import PHASES, RESERVE, estimate_memory
from megatron_tlt.config.planning.parameters import GIB
from megatron_tlt.drafter import controller
from megatron_tlt.drafter.controller import OnlineDrafterController
from megatron_tlt.models.base import KVCache
from megatron_tlt.models.config import ModelConfig
from megatron_tlt.models.eagle import torch_drafter
from megatron_tlt.models.eagle.model import EagleModel
from megatron_tlt.models.inputs import DecoderInput
from megatron_tlt.rollout.engine import GraphBudget
from megatron_tlt.rollout.sampler import SamplingRows
from megatron_tlt.sync.push import BucketedSync
from megatron_tlt.trainer import device_memory, setup
from megatron_tlt.types import HiddenStateSample
from tests.helpers.hidden_states import trajectory
from tests.helpers.ledger import Ledger, LedgerError
from tests.helpers.shape_policy import META, ShapePolicy

# Engines in processes of their own allocate what no ledger here sees.
RECIPES = [
    path
    for path in sorted((Path(__file__).parents[3] / "configs/recipes").glob("*.yaml"))
    if load_config(path).rollout.backend == "embedded"
]
ALLOWED = 0.05  # of the plan
pytestmark = pytest.mark.slow


class Ranks:
    """Rank 0 of `size` ranks, whose collectives cost what their results do."""

    def __init__(self, size: int):
        self.rank, self.size = 0, size

    def all_reduce(self, tensor):
        pass

    def all_gather(self, tensor):
        return tensor.new_empty((self.size, *tensor.shape))

    def broadcast(self, tensor):
        return tensor

    def largest(self, value):
        return value


def eagle_on_meta(config: ModelConfig) -> EagleModel:
    with META:
        return EagleModel(config)


@pytest.fixture
def on_meta(monkeypatch):
    """What would draw weights for real, talk to other ranks, or look for a GPU."""

    def graphs(rollout, decoder):
        return GraphBudget(decoder, rollout.graph_memory_mib << 20, rollout.verify_rows)

    monkeypatch.setattr(setup, "_starting_drafter", lambda c: eagle_on_meta(ModelConfig.from_hf(c.model.path)))
    monkeypatch.setattr(torch_drafter, "build_model", lambda c: eagle_on_meta(c.policy))
    monkeypatch.setattr(build, "_graphs", graphs)
    sizes = DrafterSection.sizes
    monkeypatch.setattr(DrafterSection, "sizes", lambda self, _: sizes(self, "cuda"))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no meta; all is bf16 as it is
    monkeypatch.setattr(controller, "_all_reduce", lambda tensor: None)
    no_call = SimpleNamespace(all_gather=lambda *_, **__: None, broadcast=lambda *_, **__: None)
    monkeypatch.setattr(weights, "dist", no_call)
    monkeypatch.setattr(offload, "_address", lambda tensor: tensor.untyped_storage()._cdata)
    monkeypatch.setitem(logprob._CHUNK_ELEMENTS, "meta", logprob._CHUNK_ELEMENTS["cuda"])


class Replay:
    """One rank of one pipeline stage of a recipe."""

    def __init__(self, recipe: Path, stage: int, folder: Path, monkeypatch, overrides=()):
        engine = "actor.layer_spec=transformer_engine"  # `ShapePolicy` has its layers
        config = load_config(recipe, [f"model.path={folder}", engine, *overrides])
        architecture = config.model.architecture
        names = {field.name for field in fields(ModelConfig)}
        known = {name: getattr(architecture, name) for name in names if hasattr(architecture, name)}
        bias, norm = architecture.family == "qwen2", architecture.family in ("qwen3", "qwen3_moe")
        positions = config.model.max_context
        self.shape = ModelConfig(**known, qkv_bias=bias, qk_norm=norm, max_position_embeddings=positions)
        (folder / "config.json").write_text(json.dumps(self.shape.to_hf("bfloat16")))
        self.config, self.stage, self.ranks = config, stage, config.cluster.num_ranks
        self.plan = estimate_memory(config, self.shape, self.ranks)[stage]
        merge_table = [[number] * self.ranks for number in (1, 1, 1, 0, 0)]  # tokens, steps, steps; none failed
        limit = config.cluster.memory_gib * GIB - self._apart
        metrics = [0, *[1] * 5]  # no rank failed; loss, tokens and the parts of one drafted position
        self.ledger = Ledger(limit, {(5, self.ranks): merge_table, (6,): metrics})
        self.world = SimpleNamespace(
            rank=0, size=self.ranks, device=META, local_size=8, all_gather_object=lambda value: [value],
            at_close=lambda _: None,
        )
        self.tp = Ranks(config.rollout.tp)
        # What is outside PyTorch when the cache is sized: the reserve, but for what comes later.
        there = int(config.cluster.memory_gib * GIB), self.plan.parts[RESERVE] - device_memory._LATER
        monkeypatch.setattr(device_memory, "device_use", lambda _: (*there, self.ledger.live))
        monkeypatch.setattr(setup, "_policy", lambda c, *_: ShapePolicy(c, self.shape, self.ranks, stage))

    @property
    def _apart(self) -> int:
        """What no tensor allocates."""
        return self.plan.parts[RESERVE] + self.plan.parts["fragments"]

    def build(self):
        tokenizer = SimpleNamespace(eos_token_ids=())
        self.policy, trainer, self.backend = setup.build_models(
            self.config, self.world, None, tokenizer, self.tp
        )
        self.graphs = self._captured(self.backend.engine.runner.pool)  # from here on
        self.drafter = OnlineDrafterController(self.world, self.backend, trainer)
        self.sync = BucketedSync(self.config.sync, self.backend, self.world)

    def push(self):
        drafter = self.drafter.unpublished()
        self.sync.push(self.policy.named_weights(), self.policy.policy_version, drafter)
        if drafter is not None:
            self.drafter.mark_published(drafter[1])

    def rollout(self):
        """The largest prefill; logits and draws of the largest verification; then what `generate` does at its end."""
        rollout = self.config.rollout
        self.backend.resume()
        runner = self.backend.engine.runner
        decoder = runner.decoder
        decoder.paged = lambda q, *_: torch.empty_like(q)
        prefill = self._batch(rollout.max_batched_tokens, rollout.max_running_requests)
        prefill.all_hidden = True
        every, decoder._layers = decoder._layers, decoder._layers[:2]  # what they leave behind is the same
        out = decoder.forward(prefill, KVCache(runner.kv.num_blocks, runner.kv.block_size, runner.kv.data[:2]))
        decoder._layers = every
        runner.pages.write(prefill.slot_mapping, out.hidden)
        del out
        rows = verified_rows(self.config)
        hidden = torch.empty(rows, self.shape.hidden_size, dtype=torch.bfloat16, device=META)
        logits = decoder.logits(hidden)
        few = np.zeros(128)  # the sampler takes some rows at a time
        params = few.astype(np.float32) + 1, few.astype(np.int32), few + 1, few
        runner.sampler.sample(logits[: len(few)], SamplingRows(few.astype(np.uint64), *params, False))
        del logits
        if rollout.release_cache:
            self.backend.release()

    def _captured(self, pool) -> torch.Tensor | None:
        """What captured graphs may take of their budget beside the pool's buffers."""
        budget = self.config.rollout.graph_memory_mib << 20
        return None if pool is None else torch.empty(budget - pool.graphs.memory_bytes, dtype=torch.uint8, device=META)

    def _batch(self, tokens: int, logits: int) -> DecoderInput:
        one = torch.empty(tokens, dtype=torch.int32, device=META)
        edges, tables = torch.empty(2, dtype=torch.int32, device=META), one[:8].view(1, 8)
        return DecoderInput(one, one, one, edges, one[:1], tables, one[:logits])

    def idle(self):
        """A micro-step on responses as long as it takes."""
        trainer = self.drafter.trainer
        self.drafter.begin_step(self.policy.policy_version)
        size = self.config.drafter.sizes("cuda").micro_step_tokens
        for prompt in range(self.tp.size):
            hidden = torch.zeros(size - 1, self.shape.hidden_size, dtype=torch.bfloat16)
            tokens = trajectory(np.zeros(size), 8, prompt, self.policy.policy_version)
            trainer.buffer.add(HiddenStateSample(tokens, hidden))
        assert self.drafter.train_step() is not None

    def step(self):
        for phase in PHASES:
            self.ledger.phase(phase)
            {
                "rollout": self.rollout,
                "idle window": self.idle,
                "update": self.policy.train_step,
                "merge": self.drafter.merge,
                "weight_sync": self.push,
            }[phase]()

    def run(self):
        """From the start to the end of the first step."""
        self.ledger.phase("build")
        self.build()
        self.push()
        self.start = self.ledger.live
        self.step()

    def save_and_resume(self):
        self.ledger.phase("save")
        state = self.drafter.state_dict()
        copies = [torch.empty_like(p, device="cpu") for p in self.policy.weights.values()]
        del copies
        self.ledger.phase("resume")
        with self.policy.on_device():
            self.drafter.load_state_dict(state)


def stages(recipe: Path) -> list[tuple[Path, int]]:
    return [(recipe, stage) for stage in range(load_config(recipe).actor.pp)]


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [case for recipe in RECIPES for case in stages(recipe)],
    ids=lambda value: value.stem if isinstance(value, Path) else f"stage{value}",
)
def test_a_recipe_allocates_what_the_plan_says(recipe, stage, tmp_path, monkeypatch, on_meta):
    replay = Replay(recipe, stage, tmp_path, monkeypatch)
    plan, ledger = replay.plan, replay.ledger
    with ledger:
        replay.run()
        replay.save_and_resume()
        assert abs(ledger.live - replay.start) < 0.001 * replay.start  # nothing stays behind
    seen = {name: size + replay._apart for name, size in ledger.peaks.items()}
    planned = {phase: plan.of_phase(phase) for phase in PHASES}
    print({n: f"{seen[n] / GIB:.2f} of {size / GIB:.2f}" for n, size in planned.items()}, ledger.host / GIB)
    wrong = {n: seen[n] / size for n, size in planned.items() if abs(seen[n] / size - 1) > ALLOWED}
    assert wrong == {}
    assert max(seen.values()) <= replay.config.cluster.memory_gib * GIB
    for name in ("build", "save", "resume"):
        assert seen[name] <= plan.total


SMALL = next(recipe for recipe in RECIPES if recipe.stem == "grpo-qwen2.5-7b-1n8g")


def test_half_of_what_is_free_for_the_cache_is_too_much(tmp_path, monkeypatch, on_meta):
    """The order and size of earlier versions: the engine first, its cache half of what is free."""
    kept = ["rollout.release_cache=false", "actor.offload_optimizer=false"]
    replay = Replay(SMALL, 0, tmp_path, monkeypatch, kept)

    def engine_first(config, world, algorithm, tokenizer, tp):
        trainer = setup._drafter_trainer(config, world, tp)
        cache = (replay.ledger.limit - replay.ledger.live) // 2
        backend = setup.open_backend(config, world, tokenizer, tp, trainer, kv_cache_bytes=cache)
        return setup._policy(config, world, algorithm), trainer, backend

    monkeypatch.setattr(setup, "build_models", engine_first)
    with replay.ledger, pytest.raises(LedgerError, match="out of memory"):
        replay.run()


def test_a_cache_that_is_not_given_back_is_too_much(tmp_path, monkeypatch, on_meta):
    monkeypatch.setattr(EmbeddedBackend, "release", lambda self: None)
    replay = Replay(SMALL, 0, tmp_path, monkeypatch)
    with replay.ledger, pytest.raises(LedgerError, match="out of memory"):
        replay.run()

"""What an engine of another kind cannot do is refused, each thing by its own path."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_tlt.config.checks.backend import check_backend
from megatron_tlt.config.checks.run import check_config
from megatron_tlt.config.drafter_kinds import DRAFTERS
from megatron_tlt.config.load import build_config

BASE: dict[str, Any] = {
    "model": {"path": "m", "max_context": 512},
    "rollout": {
        "max_tokens": 256,
        "max_running_requests": 64,
        "backend": "trtllm",
        "trtllm": {"python": "/opt/trtllm/bin/python"},
    },
    "algorithm": {"importance_cap": 0},
    "data": {"max_prompt_tokens": 128, "train": {"tasks": [{"name": "chain_sum"}]}},
}


# Drafts and trains: TLT on.
TRAINED = ("rollout.speculation.drafter=eagle3", "idle.train_drafter=true")


def problems(*overrides: str, device: str | None = None) -> dict[str, str]:
    config = build_config(BASE, overrides)
    return {p.path: p.allowed for p in check_config(config, None, 2, device)}


def test_a_good_configuration_has_no_problems() -> None:
    assert problems() == {}
    for device, transport, other in (("cpu", "shared_memory", "cuda_ipc"), ("cuda", "cuda_ipc", None)):
        assert problems(f"sync.transport={transport}", device=device) == {}
        assert other is None or set(problems(f"sync.transport={other}", device=device)) == {"sync.transport"}
    assert problems(*TRAINED) == {}
    assert problems("rollout.trtllm.engine.attn_backend=FLASHINFER") == {}


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (["rollout.numerics=invariant"], {"rollout.numerics"}),
        (["train.deterministic=true"], {"train.deterministic"}),
        (["rollout.stop=[x]"], {"rollout.stop"}),
        (["rollout.speculation.drafter=suffix"], {"rollout.speculation.drafter"}),
        ([*TRAINED, "rollout.speculation.selector=fixed"], {"rollout.speculation.selector"}),
        ([*TRAINED, "rollout.min_p=0.1", "eval.min_p=0.1"], {"rollout.min_p", "eval.min_p"}),
        (["rollout.tp=2"], {"rollout.tp"}),
        (["actor.router_replay=rollout"], {"actor.router_replay"}),
        (["rollout.trtllm.python=null"], {"rollout.trtllm.python"}),
        (["rollout.kernels=torch"], {"rollout.kernels"}),
        (["rollout.kv_cache_mib=4000"], {"rollout.kv_cache_mib"}),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], paths: set[str]) -> None:
    assert set(problems(*overrides)) == paths
    embedded = ["rollout.backend=embedded", *[o for o in overrides if "trtllm" not in o]]
    config = build_config(BASE, embedded)
    assert list(check_backend(config, None, None)) == [], "the embedded engine can"


VLLM = ("rollout.backend=vllm",)


def test_vllm_runs_what_it_can() -> None:
    assert problems(*VLLM) == {}
    assert problems(*VLLM, "rollout.speculation.drafter=suffix", "train.deterministic=true") == {}
    more = ("actor.router_replay=rollout", "rollout.tp=2", "rollout.release_cache=true", "algorithm.importance_cap=2")
    for device in ("cpu", "cuda"):
        assert problems(*VLLM, *more, device=device) == {}
    assert problems(*VLLM, *EAGLE_ARMS) == {}
    for kind in DRAFTERS:
        drafter = f"rollout.speculation.drafter={kind}", "rollout.speculation.drafter_path=d"
        assert problems(*VLLM, *drafter, "idle.train_drafter=true") == {}


STATES = "drafter.online.hidden_states"
EAGLE_ARMS = [
    *("rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=d"),
    *("rollout.speculation.selector=beg_mab", "rollout.speculation.bandit.arms=[4, 0]"),
]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["rollout.backend=embedded"], None),
        (["rollout.backend=embedded", f"{STATES}=actor"], None),
        ([*VLLM, f"{STATES}=actor", "rollout.vllm.hidden_mib=0"], None),
        ([*VLLM, "rollout.vllm.hidden_mib=0"], "rollout.vllm.hidden_mib"),
        (["rollout.backend=embedded", f"{STATES}=actor", "rollout.tp=2"], STATES),
    ],
)
def test_where_hidden_states_come_from(overrides: list[str], path: str | None) -> None:
    eagle = ("rollout.speculation.drafter=eagle", "rollout.speculation.drafter_path=d", "idle.train_drafter=true")
    assert set(problems(*eagle, *overrides)) == ({path} if path else set())


def test_trtllm_gives_no_hidden_states_and_the_actor_does() -> None:
    assert problems(*TRAINED, f"{STATES}=engine")[STATES].endswith("trtllm, which gives none")
    assert problems(*TRAINED, f"{STATES}=actor") == {}
    at = "rollout.speculation"
    assert "must be 'none', 'eagle3'" in problems(*TRAINED, f"{at}.drafter=eagle")[f"{at}.drafter"]


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("vllm.engine.seed=2", "train.seed"),
        ("vllm.engine.data_parallel_size=2", "rollout.tp"),
        ("vllm.engine.gpu_memory_utilization=0.9", "rollout.kv_cache_mib"),
        ("vllm.engine.compilation_config={level: 3}", "rollout.graph_memory_mib"),
        ("vllm.engine.disable_log_stats=true", "metrics.jsonl"),
        ("trtllm.engine.kv_cache_config={free_gpu_memory_fraction: 0.9}", "rollout.trtllm.kv_cache_fraction"),
    ],
)
def test_an_argument_that_another_setting_gives_is_refused_by_its_name(argument: str, instead: str) -> None:
    """Before policy and optimizer are built, not at the engine's start."""
    (found,) = problems(f"rollout.backend={argument.partition('.')[0]}", f"rollout.{argument}").items()
    assert found[0] == f"rollout.{argument.partition('=')[0]}"
    assert found[1].startswith("must not be set: ") and instead in found[1]


def test_an_argument_may_be_a_map() -> None:
    assert problems(*VLLM, "rollout.vllm.engine.additional_config={a: {b: 1}}") == {}


def test_what_vllm_cannot_do_is_refused() -> None:
    assert set(problems(*VLLM, "rollout.kernels=torch")) == {"rollout.kernels"}
    arms = "rollout.speculation.bandit.arms"
    assert set(problems(*VLLM, *EAGLE_ARMS, f"{arms}=[0]")) == {arms}
    found = problems(*VLLM, "rollout.numerics=invariant", "sync.transport=shared_memory", device="cpu")
    assert "needs Triton" in found.pop("rollout.numerics") and not found
    assert problems(*VLLM, "rollout.numerics=invariant", device="cuda") == problems(*VLLM, device="cuda")

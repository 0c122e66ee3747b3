from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_tlt.drafters.eagle.config import EagleConfig
from megatron_tlt.drafters.training.trainer import DrafterTrainer
from megatron_tlt.drafters.training.training_state import TrainingState
from megatron_tlt.errors import CheckpointError, DrafterError
from megatron_tlt.models.decoders.base import DTYPES
from tests.helpers.tiny_drafters import CONFIG, everything, lookup_tables, online_trainer, random_chunk


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_steps_learn_and_are_bounded(dtype: str) -> None:
    t = online_trainer(dtype=dtype)
    assert {p.dtype for p in t.model.parameters()} == {DTYPES[dtype]}
    seen = [t.train_step() for _ in range(36)]
    assert all(m["tokens"] <= 64 for m in seen)
    first, last = ([m["accept/1"] for m in part] for part in (seen[:8], seen[-8:]))
    assert sum(last) > sum(first) + 0.5
    assert seen[0]["lr"] == pytest.approx(1e-3) and seen[-1]["lr"] == 3e-3
    assert t.trained_steps == 36
    assert t.window_tokens > 0


def test_the_rate_falls_from_start_lr_to_lr_as_drafts_get_better() -> None:
    t = online_trainer(lr=1e-3, start_lr=9e-3)
    seen = [t.train_step() for _ in range(50)][3:]  # without warm-up
    for m in seen:
        assert m["lr"] == pytest.approx(1e-3 + 8e-3 * (1 - m["accept/1"]))
    assert seen[0]["lr"] > 7e-3 and min(m["lr"] for m in seen) < 5e-3
    assert online_trainer(lr=1e-3, start_lr=1e-4, warmup=0).train_step()["lr"] == 1e-3


def test_a_trained_drafter_learns_at_lr_and_a_wide_one_at_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"lr": 1e-3, "start_lr": 9e-3, "warmup": 0}
    assert online_trainer(fresh=False, **rates).train_step()["lr"] == 1e-3
    monkeypatch.setattr("megatron_tlt.drafters.training.online_trainer._WIDTH", CONFIG.hidden_size / 4)
    assert online_trainer(fresh=False, **rates).train_step()["lr"] == pytest.approx(2.5e-4)
    seen = online_trainer(**rates).train_step()
    assert seen["lr"] == pytest.approx((1e-3 + 8e-3 * (1 - seen["accept/1"])) / 4)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_responses_that_the_ranks_of_an_engine_share_count_once(tp_rank: int) -> None:
    t = online_trainer(lengths=(9, 12))
    t._tp = SimpleNamespace(rank=tp_rank)  # type: ignore[assignment]
    found = {name.rpartition("/")[2]: metric.value for name, metric in t.buffer_metrics().items()}
    assert found["bytes"] > 0, "each rank holds them"
    assert (found["responses"], found["added"]) == ((2, 2) if tp_rank == 0 else (0, 0))


def test_the_engines_tables_are_read_once_a_window_and_let_go_behind_it() -> None:
    t, reads = online_trainer(), []

    def tables(version: int):
        reads.append(version)
        return lookup_tables(CONFIG, seed=version)

    for version in (1, 2):
        t.begin_step(version, lambda version=version: tables(version))
        t.buffer.add(random_chunk(CONFIG, 36 - 12 * version, 100 * version, version))
        for _ in range(3):
            t.train_step()
            assert torch.equal(t._tables[1], lookup_tables(CONFIG, seed=version)[1])
        t.merge_replicas()
        assert t._tables is None
    assert reads == [1, 2]


def test_a_merge_alone_keeps_every_bit_and_counts() -> None:
    t, plain = online_trainer(), online_trainer()
    for _ in range(3):
        t.train_step()
        plain.train_step()
    report = t.merge_replicas()
    assert t.version == report["drafter/version"] == 1 and not report["drafter/disabled"]
    assert torch.equal(everything(t), everything(plain))
    assert t.train_step() == plain.train_step()
    for _ in range(2):
        t.merge_replicas()
        assert t.version == 2


def test_a_merge_that_takes_longer_than_the_training_is_put_off_and_nothing_is_lost() -> None:
    t, plain, reads = online_trainer(), online_trainer(), []
    t.train_step()
    t.merge_replicas()
    t._merge_seconds = 1e9
    for version in (1, 2):
        t.begin_step(version, lambda version=version: reads.append(version) or lookup_tables(CONFIG))
        t.train_step()
        t.merge_replicas(at_once=False)
        assert t.version == 1 and t.window_tokens > 0 and t._tables is None
    assert reads == [1, 2], "a policy's tables are read again after its update"
    t._merge_seconds = 0.0
    t.merge_replicas(at_once=False)
    assert t.version == 2 and t.window_tokens == 0 and t._merge_seconds > 0
    plain.train_step()
    for version in (1, 2):
        plain.begin_step(version, lambda: lookup_tables(CONFIG))
        plain.train_step()
    assert torch.equal(everything(t), everything(plain))


@pytest.mark.parametrize("what", ["hidden", "head"])
def test_what_is_not_finite_ends_training_where_the_window_began(what: str) -> None:
    t = online_trainer()
    for _ in range(2):
        t.train_step()
    t.merge_replicas()
    begun = everything(t)
    t.train_step()
    assert not torch.equal(everything(t), begun)
    if what == "hidden":
        for entry in t.buffer._entries.values():
            entry.sequence.hidden[-1] = torch.inf
    else:
        t._tables[1][3] = torch.nan
    with pytest.raises(DrafterError, match="gradient norm is nan"):
        [t.train_step() for _ in range(20)]
    assert torch.equal(everything(t), begun) and t.trained_steps == 2
    assert t.has_failed and t.train_step() is None
    assert t.merge_replicas()["drafter/disabled"] == 1 and t.version == 1 and torch.equal(everything(t), begun)


@pytest.mark.parametrize("kind", ["cuda", "pinned", "cpu", "bug"])
def test_out_of_memory_is_a_drafter_error_and_a_bug_is_not(monkeypatch, kind: str) -> None:
    t = online_trainer()
    t.train_step()

    def fail(*_):
        if kind == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if kind == "pinned":  # what cudaHostAlloc's failure is raised as
            raise RuntimeError("CUDA error: out of memory")
        if kind == "cpu":
            torch.empty(1 << 50)
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(DrafterTrainer, "backward", fail)
    if kind == "bug":
        with pytest.raises(RuntimeError, match="shapes differ"):
            t.train_step()
        return
    with pytest.raises(DrafterError, match=r"out of memory in a drafter micro-step of 64 tokens"):
        t.train_step()
    assert t.window_tokens == 0 and t.has_failed
    assert torch.equal(everything(t), everything(online_trainer(lengths=())))


@pytest.mark.parametrize("method", ["step", "update_mean"])
@pytest.mark.parametrize(("ranks", "error"), [(1, DrafterError), (2, torch.OutOfMemoryError)])
def test_out_of_memory_in_a_step_with_collectives_is_not_rolled_back(monkeypatch, ranks, error, method) -> None:
    t = online_trainer()
    t._tp = SimpleNamespace(rank=0, size=ranks, all_reduce=lambda values: None)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainingState, method, fail)
    with pytest.raises(error):
        t.train_step()
    assert t.has_failed == (ranks == 1)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_what_is_drafted_with_is_the_running_mean(decay: float) -> None:
    t = online_trainer(mean_decay=decay)
    mean = {name: p.detach().clone() for name, p in t.model.named_parameters()}
    for n in range(1, 15):
        t.train_step()
        d = min(decay, n / (n + 9))
        mean = {name: d * mean[name] + (1 - d) * p.detach() for name, p in t.model.named_parameters()}
    t.merge_replicas()
    for name, p in t.model.named_parameters():
        torch.testing.assert_close(t.weights()[name], mean[name])
        assert torch.equal(t.weights()[name], p) == (decay == 0.0)
        assert torch.equal(t.state_dict()["model"][name], t.weights()[name])


def test_the_running_mean_of_a_loaded_drafter_begins_at_its_weights() -> None:
    t = online_trainer(fresh=False)
    start = {name: p.detach().clone() for name, p in t.model.named_parameters()}
    t.train_step()
    t.merge_replicas()
    for name, p in t.model.named_parameters():
        assert (t.weights()[name] - start[name]).norm() < 0.05 * (p - start[name]).norm()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_trainer_goes_on_bit_for_bit(dtype: str) -> None:
    one, two = online_trainer(dtype=dtype), online_trainer(lengths=(), dtype=dtype)
    for _ in range(4):
        one.train_step()
    assert one.window_is_begun and one.version == 0
    state = one.state_dict()  # with the merge that is due
    assert {name: tuple(w.shape) for name, w in state["model"].items()} == EagleConfig.of(CONFIG).shapes()
    two.load_state_dict(state)
    assert two.version == 1
    fresh = [random_chunk(CONFIG, n, 50 + n, 1) for n in (20, 31)]
    for t in (one, two):
        t.begin_step(1, lambda: lookup_tables(CONFIG, 1))
        t.buffer._drop([e for e in t.buffer._entries.values() if e.key[0] == 0])
        t.buffer._epochs = 0
        for chunk in fresh:
            t.buffer.add(chunk)
    # The buffer's data is not saved: what both have from here on is the same.
    for _ in range(3):
        assert one.train_step() == two.train_step()
    assert torch.equal(everything(one), everything(two))


def test_a_dropped_window_leaves_no_trace() -> None:
    """A run that ends in the middle of a step saves the drafter as it was before the step."""
    one = online_trainer()
    one.train_step()
    one.merge_replicas()
    before = {name: w.clone() for name, w in one.weights().items()}
    counts = one.version, one.trained_steps
    for _ in range(3):
        one.train_step()
    one.drop_window()
    state = one.state_dict()
    assert all(torch.equal(state["model"][name], w) for name, w in before.items())
    assert (one.version, one.trained_steps) == counts and one.window_tokens == 0


def test_another_drafters_state_is_refused() -> None:
    t = online_trainer()
    state = t.state_dict()
    with pytest.raises(CheckpointError, match="no 'exp_avg'"):
        t.load_state_dict({k: v for k, v in state.items() if k != "exp_avg"})
    state["model"] = {**state["model"], "fc.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \(2, 2\)"):
        t.load_state_dict(state)


def test_a_reduced_vocabulary_is_that_of_the_first_responses_of_all_ranks() -> None:
    """Chosen in the first merge, whose other rank's responses all have token 7; a resumed run goes on with it."""

    def add_another_rank(tensor: torch.Tensor) -> None:
        if tensor.shape == (CONFIG.vocab_size,):
            tensor[7] += 1000

    trainer = online_trainer(tokens=30, world=SimpleNamespace(rank=0, size=1, all_reduce=add_another_rank))

    assert trainer.train_step() is None
    counts = trainer.buffer.token_counts(CONFIG.vocab_size)
    drawn = torch.cat([e.sequence.token_ids[e.sequence.drawn] for e in trainer.buffer._entries.values()])
    assert torch.equal(counts, torch.bincount(drawn, minlength=CONFIG.vocab_size))
    report = trainer.merge_replicas()
    ids = trainer.model.token_ids()
    counts[7] += 1000
    assert ids is not None and 7 in ids
    left_out = ~torch.isin(torch.arange(len(counts)), ids)
    assert counts[ids].min() >= counts[left_out].max()
    counts[7] -= 1000
    assert report["drafter/coverage"] == int(counts[ids].sum()) / int(counts.sum()) < 1
    assert trainer.version == 1 and torch.equal(trainer.weights()["d2t"], ids - torch.arange(30))
    assert trainer.train_step() is not None
    trainer.merge_replicas()
    resumed = online_trainer(tokens=30)
    resumed.load_state_dict(trainer.state_dict())
    assert torch.equal(resumed.model.token_ids(), ids) and resumed.train_step() is not None

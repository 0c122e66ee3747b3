"""Whole runs on real ranks: parallel layouts and algorithms."""

import pytest

from tests.helpers.runs import rows, train_many, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_layouts_of_four_ranks_train_alike(tmp_path):
    """TP x PP actors and TP engines see the same responses as four single ranks, and learn the same."""
    config = write_config(tmp_path, train={"num_steps": 2}, sync={"verify": True}, checkpoint={"every": 0})
    layouts = {
        "dp4": [],
        "tp2pp2": ["actor.tp=2", "actor.pp=2"],
        "tp2pp2_engine_tp2": ["actor.tp=2", "actor.pp=2", "actor.sequence_parallel=true", "rollout.tp=2"],
    }
    train_many(config, layouts, ranks=4)
    reference = rows(tmp_path / "dp4")
    assert len(reference) == 2
    for name in layouts:
        for mine, theirs in zip(rows(tmp_path / name), reference, strict=True):
            assert mine["length/mean"] == theirs["length/mean"]
            for counter in ("generated_tokens", "prompt_tokens", "finished_requests"):
                assert mine[f"engine/{counter}"] == theirs[f"engine/{counter}"], "an engine of two ranks counts once"
            assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-9)
            assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], abs=1e-4)
            assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-3)


def test_algorithms_train(tmp_path):
    """Each branch of a step: a reference, a KL in the reward, groups asked for again, ratios of whole responses. Ratios
    and KLs are at the temperature of the rollout.
    """
    off = {"checkpoint": {"every": 0}, "eval": {"every": 0}}
    config = write_config(tmp_path, train={"num_steps": 2}, rollout={"temperature": 0.7}, **off)
    again = ["algorithm.dynamic_sampling=true", "algorithm.overlong_buffer=8"]
    variants = {
        "grpo_kl": ["algorithm.kl_coef=0.1", "algorithm.mini_batches=2"],
        "dapo": ["algorithm.name=dapo", "algorithm.kl_coef=0.1", *again],
        "reinforce": ["algorithm.name=reinforce_pp", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
        "gspo": ["algorithm.name=gspo", "algorithm.mini_batches=2"],
    }
    train_many(config, variants)
    for name in variants:
        mine = rows(tmp_path / name)
        assert [row["step"] for row in mine] == [1, 2], name
        assert all(row["policy/grad_norm"] > 0 for row in mine), name
        assert all(row["policy/mismatch_abs"] < 1e-4 for row in mine), name
    assert rows(tmp_path / "dapo")[0]["policy/kl_ref"] < 1e-6, "of one update, whose policy is the reference"

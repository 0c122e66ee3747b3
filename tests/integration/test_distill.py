"""Distillation on real ranks: the KL to a teacher falls, and neither TLT nor a layout changes what is learned."""

from pathlib import Path

import pytest
from make_demo_policy import write_experts

from tests.helpers.columns import undocumented_of
from tests.helpers.mpi import run_ranks
from tests.helpers.runs import TLT_ON, assert_same_checkpoint, make_model, rows, train_many, write_config

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.ci]

ALONE = ["rewards.functions=[]", "data.eval=null"]


def write_run(folder: Path, num_steps: int, every: int) -> Path:
    """A run that learns from a teacher of four layers, twice as wide as the policy's two."""
    teacher = make_model(folder / "teacher", num_layers=4, hidden_size=64)
    distill = {"name": "distill", "teacher": str(teacher)}
    train, none = {"num_steps": num_steps, "prompts_per_step": 8}, {"every": 0}
    return write_config(folder, algorithm=distill, train=train, eval=none, checkpoint={"every": every})


def test_a_student_approaches_its_teacher_in_the_same_bits_with_tlt(tmp_path: Path) -> None:
    """With TLT on in one go; off in two, for a resumed run reads its teacher again."""
    config, learns = write_run(tmp_path, num_steps=8, every=4), [*ALONE, "optimizer.lr=1e-2"]
    train_many(config, {"on": [*learns, *TLT_ON], "off": [*learns, "train.num_steps=4"]})
    run_ranks(2, ["-m", "megatron_tlt", "train"], str(config), *learns, f"train.run_dir={tmp_path / 'off'}")
    on, off = rows(tmp_path / "on"), rows(tmp_path / "off")
    assert undocumented_of(on) == [], "columns that docs/reference/metrics.md does not have"
    kl = [row["policy/teacher_kl"] for row in on]
    assert len(kl) == 8 and kl[-1] < 0.9 * kl[0], kl
    assert kl == [row["policy/teacher_kl"] for row in off]
    assert all(row["engine/spec_row_steps"] > 0 for row in on) and not off[0]["engine/spec_row_steps"]
    assert not any(name.startswith("reward/") for name in on[0]), "no response was judged"
    last = "checkpoints/step-000008"
    assert_same_checkpoint(tmp_path / "on" / last, tmp_path / "off" / last)


def test_layouts_adapters_and_rewards(tmp_path: Path) -> None:
    """One teacher's log-probs in every layout; a teacher of experts beside adapters; advantages of rewards besides."""
    config = write_run(tmp_path, num_steps=2, every=0)
    write_experts(tmp_path / "teacher", tmp_path / "experts", seed=0)
    jobs = {
        "plain": ALONE,
        "tp": [*ALONE, "actor.tp=2", "actor.sequence_parallel=true"],
        "pp": [*ALONE, "actor.pp=2"],
        "cp": [*ALONE, "actor.cp=2"],
        "adapters": [*ALONE, "actor.lora.rank=4", f"algorithm.teacher={tmp_path / 'experts'}"],
        "rewards": ["algorithm.kl_coef=0.1", "algorithm.mini_batches=2"],
    }
    train_many(config, jobs)
    found = {name: rows(tmp_path / name) for name in jobs}
    for name in ("tp", "pp", "cp"):
        for mine, theirs in zip(found[name], found["plain"], strict=True):
            for metric in ("policy/teacher_kl", "policy/grad_norm"):
                assert mine[metric] == pytest.approx(theirs[metric], rel=1e-4), (name, metric)
    first = found["plain"][0]["policy/teacher_kl"]
    assert found["rewards"][0]["policy/teacher_kl"] == pytest.approx(first, rel=1e-4), "the first rollout is the same"
    assert abs(found["adapters"][0]["policy/teacher_kl"] - first) > 1e-3, "another teacher"
    assert all(row["policy/grad_norm"] > 0 for of_run in found.values() for row in of_run)
    assert all("reward/mean" in row for row in found["rewards"])

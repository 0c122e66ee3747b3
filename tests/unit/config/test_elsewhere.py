"""Settings of other frameworks' scripts: each has a place here, or `check` says that there is none."""

import pytest

from megatron_tlt.config.elsewhere import ELSEWHERE
from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import paths_of
from tests.unit.config.test_load import BASE, problems


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("critic.optim.lr=1e-5", "there is none here (no critic)"),
        ("reward_model.model.path=m", "there is none here (no reward model;"),
        ("trainer.project_name=x", "did you mean observe.wandb_project?"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
            "did you mean optimizer.warmup_steps? (there: RL steps; here: optimizer steps, algorithm.mini_batches of",
        ),
        ("max_steps=100", "did you mean train.num_steps? (there: optimizer steps, algorithm.mini_batches of"),
        ("save_steps=100", "did you mean checkpoint.every? (there: optimizer steps, algorithm.mini_batches of"),
        ("actor_rollout_ref.actor.optim.min_lr=0", "did you mean optimizer.min_lr?"),
        ("algorithm.rollout_correction.rollout_is_threshold=2", "did you mean algorithm.importance_cap?"),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "did you mean actor.router_replay? (R3 is rollout here"),
        ("algorithm.kl_ctrl.type=adaptive", "there is none here (algorithm.kl_coef stays"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "did you mean actor.micro_batch_tokens?"),
        ("actor_rollout_ref.rollout.disable_log_stats=true", "there is none here (metrics.jsonl"),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=1", "did you mean algorithm.overlong_buffer?"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=true", "did you mean eval.temperature? (verl evaluates"),
        ("policy.generation.temperature=1", "did you mean rollout.temperature?"),
        ("policy.sequence_packing.train_mb_tokens=1", "did you mean actor.micro_batch_tokens?"),
        ("env.math.num_workers=8", "did you mean rewards.workers?"),
        ("grpo.seed=1", "did you mean train.seed?"),
        ("teacher.model_name=m", "did you mean algorithm.teacher? (with algorithm.name: distill)"),
        ("teacher_model_name_or_path=m", "did you mean algorithm.teacher?"),
        ("teacher.tokenizer.name=m", "there is none here (a teacher has the policy's tokenizer"),
        ("num_iterations=1", "there is none here (a step trains once on each response)"),
    ],
)
def test_the_place_is_the_right_one(override, says):
    (allowed,) = problems(BASE, override).values()
    assert allowed.startswith(f"unknown key; {says}")


def test_names_elsewhere_are_of_settings_here_and_each_stands_once():
    names = [name for row, _ in ELSEWHERE for name in row.split()]
    assert len(names) > 80 and len(set(names)) == len(names)
    assert {here.path for _, here in ELSEWHERE if here.path} <= {*paths_of(Config)}
    assert all(here.note for _, here in ELSEWHERE if not here.path), "none: the note says why"

"""Settings of other frameworks' scripts: each has a place here, or `check` says that there is none."""

import pytest

from megatron_tlt.config.elsewhere import ELSEWHERE
from megatron_tlt.config.load import build_config
from megatron_tlt.config.root import Config
from megatron_tlt.config.schema import paths_of
from megatron_tlt.errors import ConfigError

VERL = """
algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=true algorithm.use_kl_in_reward=false
algorithm.gamma=1.0 algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc
algorithm.filter_groups.max_num_gen_batches=10 data.train_files=train.parquet data.val_files=test.parquet
data.prompt_key=prompt data.shuffle=false data.seed=1 data.train_batch_size=512 data.gen_batch_size=1536
data.max_prompt_length=1024 data.max_response_length=8192 data.filter_overlong_prompts=true data.truncation=error
data.return_raw_chat=true data.reward_fn_key=data_source actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
actor_rollout_ref.model.use_remove_padding=true actor_rollout_ref.model.enable_gradient_checkpointing=true
actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32
actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.trust_remote_code=false
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.optim.warmup_style=cosine
actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_dynamic_bsz=true
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.ppo_epochs=1
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.use_kl_loss=true
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.use_torch_compile=true actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
actor_rollout_ref.actor.fsdp_config.param_offload=false actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.megatron.sequence_parallel=true actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.ref.fsdp_config.param_offload=true actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.max_num_batched_tokens=16384 actor_rollout_ref.rollout.max_num_seqs=256
actor_rollout_ref.rollout.max_model_len=9216 actor_rollout_ref.rollout.enforce_eager=false
actor_rollout_ref.rollout.free_cache_engine=true actor_rollout_ref.rollout.enable_chunked_prefill=true
actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=0.6
actor_rollout_ref.rollout.val_kwargs.top_p=0.95 actor_rollout_ref.rollout.val_kwargs.n=8
+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=0 actor_rollout_ref.rollout.multi_turn.enable=false
critic.optim.lr=1e-5 critic.model.path=m reward_model.enable=false reward_model.model.path=m
reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true
+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 ++reward_model.reward_kwargs.max_resp_len=8192
custom_reward_function.path=f.py custom_reward_function.name=score trainer.critic_warmup=0
trainer.logger=[console,wandb] trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=8
trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.val_before_train=true
trainer.log_val_generations=10 trainer.resume_mode=auto trainer.max_actor_ckpt_to_keep=3
trainer.default_local_dir=ckpt trainer.balance_batch=true trainer.device=cuda ray_kwargs.ray_init.num_cpus=8
"""
TRL = """
model_name_or_path=Qwen/Qwen2.5-7B dataset_name=d learning_rate=1e-6 max_grad_norm=0.2 lr_scheduler_type=cosine
warmup_ratio=0.1 adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 gradient_checkpointing=true bf16=true seed=42
per_device_train_batch_size=8 gradient_accumulation_steps=4 steps_per_generation=8 generation_batch_size=64
num_generations=8 max_completion_length=1024 max_prompt_length=512 num_train_epochs=1 num_iterations=1 beta=0.0
epsilon=0.2 epsilon_high=0.28 delta=2.0 loss_type=dapo scale_rewards=group importance_sampling_level=token
mask_truncated_completions=true use_vllm=true vllm_mode=colocate vllm_gpu_memory_utilization=0.3
vllm_tensor_parallel_size=1 vllm_importance_sampling_cap=2.0 reward_funcs=f reward_weights=[1.0] temperature=1.0
save_steps=20 eval_steps=10 eval_strategy=steps save_total_limit=3 logging_steps=1 report_to=wandb run_name=r
output_dir=o log_completions=true use_peft=true lora_r=32 lora_alpha=32 lora_target_modules=[q_proj]
attn_implementation=sdpa
"""
NEMO_RL = """
grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=16 grpo.max_num_steps=100 grpo.max_num_epochs=1
grpo.max_rollout_turns=1 grpo.normalize_rewards=true grpo.use_leave_one_out_baseline=true grpo.val_period=10
grpo.val_at_start=false grpo.overlong_filtering=false grpo.max_val_samples=256 grpo.val_batch_size=256 grpo.seed=42
grpo.async_grpo.enabled=false loss_fn.reference_policy_kl_penalty=0.01 loss_fn.reference_policy_kl_type=k3
loss_fn.ratio_clip_min=0.2 loss_fn.ratio_clip_max=0.2 loss_fn.ratio_clip_c=null loss_fn.token_level_loss=true
loss_fn.use_importance_sampling_correction=false checkpointing.enabled=true checkpointing.checkpoint_dir=results
checkpointing.metric_name=val checkpointing.keep_top_k=3 checkpointing.save_period=10 policy.model_name=m
policy.tokenizer.name=m policy.train_global_batch_size=512 policy.train_micro_batch_size=4 policy.logprob_batch_size=4
policy.max_total_sequence_length=4096 policy.precision=bfloat16 policy.max_grad_norm=1.0
policy.dtensor_cfg.enabled=false policy.dtensor_cfg.activation_checkpointing=true policy.megatron_cfg.enabled=true
policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.optimizer.lr=5e-6
policy.megatron_cfg.optimizer.min_lr=5e-7 policy.megatron_cfg.optimizer.weight_decay=0.01
policy.megatron_cfg.optimizer.adam_beta2=0.999 policy.megatron_cfg.scheduler.lr_decay_style=constant
policy.megatron_cfg.scheduler.lr_warmup_iters=13 policy.dynamic_batching.enabled=false
policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=8192 policy.optimizer.kwargs.lr=5e-6
policy.optimizer.kwargs.weight_decay=0.01 policy.generation.backend=vllm policy.generation.temperature=1.0
policy.generation.top_p=1.0 policy.generation.top_k=null policy.generation.max_new_tokens=4096
policy.generation.vllm_cfg.tensor_parallel_size=1 policy.generation.vllm_cfg.gpu_memory_utilization=0.6
policy.generation.vllm_cfg.precision=bfloat16 policy.generation.colocated.enabled=true data.max_input_seq_length=4096
data.dataset_name=d data.shuffle=true env.math.num_workers=8 logger.log_dir=logs logger.wandb_enabled=true
logger.wandb.project=p logger.wandb.name=n logger.tensorboard_enabled=true cluster.gpus_per_node=8 cluster.num_nodes=2
"""


def problems(*overrides: str) -> dict[str, str]:
    """What is allowed, by path."""
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"path": "m"}}, overrides)
    return {p.path: p.allowed for p in caught.value.problems}


@pytest.mark.parametrize("script", [VERL, TRL, NEMO_RL], ids=["verl", "trl", "nemo_rl"])
def test_every_setting_of_a_usual_script_has_a_place_or_there_is_none(script):
    found = problems(*script.split())
    assert {*found} == {word.partition("=")[0] for word in script.split()}
    answers = ("unknown key; did you mean ", "unknown key; there is none here (")
    assert {path: allowed for path, allowed in found.items() if not allowed.startswith(answers)} == {}


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
        (
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "did you mean eval.temperature? (verl evaluates greedily",
        ),
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
    (allowed,) = problems(override).values()
    assert allowed.startswith(f"unknown key; {says}")


def test_names_elsewhere_are_of_settings_here_and_each_stands_once():
    names = [name for row, _ in ELSEWHERE for name in row.split()]
    assert len(names) > 80 and len(set(names)) == len(names)
    assert {here.path for _, here in ELSEWHERE if here.path} <= {*paths_of(Config)}
    assert all(here.note for _, here in ELSEWHERE if not here.path), "none: the note says why"

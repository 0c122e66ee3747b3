"""Names of settings in verl, NeMo-RL, TRL, vLLM and Megatron-LM that are too far from ours for a spelling match.

Error messages name ours, and `docs/reference/config.md` has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from megatron_tlt.config.schema import paths_of


class Here(NamedTuple):
    """A setting here, and what differs from the one that has another name elsewhere."""

    path: str
    """Empty: there is none here."""
    note: str = ""


_OPTIMIZER_STEPS_THERE = "there: optimizer steps, algorithm.mini_batches of them an RL step; here: RL steps"
# Names with white space between them, each the end of its path there, or (`critic.*`) all that is below a part of it:
# the longest end that is found decides.
ELSEWHERE: tuple[tuple[str, Here], ...] = (
    ("model_name_or_path model_name", Here("model.path", "no conversion")),
    ("teacher.model_name teacher_model_name_or_path", Here("algorithm.teacher", "with algorithm.name: distill")),
    ("max_model_len max_total_sequence_length vllm_max_model_length", Here("model.max_context")),
    ("tokenizer_path tokenizer.name", Here("model.tokenizer")),
    ("torch_dtype policy.precision bf16", Here("actor.dtype", "here: fp32 or bf16; the engine's is rollout.dtype")),
    ("tensor_model_parallel_size", Here("actor.tp")),
    ("pipeline_model_parallel_size", Here("actor.pp")),
    ("context_parallel_size ulysses_sequence_parallel_size", Here("actor.cp")),
    ("expert_model_parallel_size", Here("actor.ep")),
    ("sequence_parallel", Here("actor.sequence_parallel")),
    (
        "recompute_granularity enable_gradient_checkpointing gradient_checkpointing activation_checkpointing",
        Here("actor.recompute", "here: none, selective or full"),
    ),
    ("recompute_modules", Here("actor.recompute_modules")),
    ("use_distributed_optimizer", Here("actor.distributed_optimizer")),
    ("overlap_grad_reduce overlap_param_gather", Here("actor.overlap", "both")),
    ("moe_aux_loss_coeff", Here("actor.load_balancing_loss")),
    ("moe_z_loss_coeff", Here("actor.router_z_loss")),
    ("lora_rank lora_r lora.rank use_peft", Here("actor.lora.rank", "no section actor.lora: no LoRA")),
    ("lora_alpha lora.alpha", Here("actor.lora.alpha")),
    (
        "target_modules lora_target_modules lora.target_modules",
        Here("actor.lora.targets", "here: names such as q_proj; unset: all seven"),
    ),
    ("optimizer_offload grad_offload", Here("actor.offload_optimizer", "both")),
    (
        "ppo_max_token_len_per_gpu",
        Here("actor.micro_batch_tokens", "with actor.cp the budget of all ranks of a replica together"),
    ),
    ("log_prob_max_token_len_per_gpu train_mb_tokens logprob_mb_tokens", Here("actor.micro_batch_tokens")),
    (
        """ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu ppo_micro_batch_size log_prob_micro_batch_size
        train_micro_batch_size logprob_batch_size gradient_accumulation_steps""",
        Here("actor.micro_batch_tokens", "here: tokens of a micro-batch; how many there are follows"),
    ),
    ("learning_rate optim.lr kwargs.lr", Here("optimizer.lr")),
    (
        "lr_warmup_steps lr_warmup_iters",
        Here(
            "optimizer.warmup_steps",
            "there: RL steps; here: optimizer steps, algorithm.mini_batches of them a step; verl's -1: by the ratio",
        ),
    ),
    ("lr_warmup_steps_ratio warmup_ratio", Here("optimizer.warmup_steps", "here: optimizer steps, not a share")),
    (
        "lr_scheduler_type warmup_style lr_decay_style",
        Here("optimizer.schedule", "here: constant, linear or cosine, after the warm-up"),
    ),
    ("optim.min_lr", Here("optimizer.min_lr")),
    ("min_lr_ratio", Here("optimizer.min_lr", "here: a rate, not a share")),
    ("weight_decay", Here("optimizer.weight_decay")),
    ("adam_beta1 betas", Here("optimizer.beta1", "the second one is optimizer.beta2")),
    ("adam_beta2", Here("optimizer.beta2", "0.95 here, 0.999 there")),
    ("max_grad_norm grad_clip clip_grad", Here("optimizer.clip_grad")),
    ("rollout.name generation.backend use_vllm", Here("rollout.backend", "here: embedded, vllm or trtllm")),
    ("rollout.tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size", Here("rollout.tp")),
    ("vllm_cfg.precision", Here("rollout.dtype", "here: fp32 or bf16")),
    ("generation.temperature", Here("rollout.temperature")),
    ("generation.top_p", Here("rollout.top_p")),
    ("rollout.top_k generation.top_k", Here("rollout.top_k", "there -1 or null, here 0: off")),
    ("rollout.do_sample", Here("rollout.temperature", "0 is greedy")),
    ("stop_strings", Here("rollout.stop")),
    (
        "engine_kwargs.vllm.* vllm_kwargs.* enable_chunked_prefill",
        Here("rollout.vllm.engine", "a map of vLLM's arguments"),
    ),
    ("disable_log_stats", Here("", "metrics.jsonl has the figures of rollouts")),
    ("enforce_eager", Here("rollout.graph_memory_mib", "here: MiB of graphs; 0: none")),
    ("update_weights_bucket_megabytes", Here("sync.bucket_mib")),
    ("nccl_timeout ddp_timeout", Here("distributed.timeout_s")),
    ("trainer.device", Here("distributed.device")),
    ("n num_generations num_generations_per_prompt num_samples group_size", Here("rollout.samples_per_prompt")),
    (
        "max_response_length max_completion_length max_new_tokens response_length max_resp_len",
        Here("rollout.max_tokens"),
    ),
    ("max_num_seqs", Here("rollout.max_running_requests")),
    ("max_num_batched_tokens", Here("rollout.max_batched_tokens")),
    (
        "gpu_memory_utilization vllm_gpu_memory_utilization",
        Here("rollout.kv_cache_mib", "here: MiB of the KV cache, not a share; unset: what the memory plan leaves"),
    ),
    ("free_cache_engine", Here("rollout.release_cache")),
    ("partial_rollout", Here("rollout.carry_over", "here: tokens of a response a step")),
    ("num_speculative_tokens", Here("rollout.speculation.draft_len")),
    (
        """adv_estimator norm_adv_by_std_in_grpo loss_agg_mode policy_loss.loss_mode loss_type scale_rewards
        importance_sampling_level normalize_rewards use_leave_one_out_baseline token_level_loss
        sequence_level_importance_ratios""",
        Here("algorithm.name", "advantage and loss together; which is which: docs/guides/algorithms.md"),
    ),
    ("epsilon clip_ratio", Here("algorithm.ratio_clip_low", "the upper one is algorithm.ratio_clip_high")),
    ("clip_ratio_low ratio_clip_min", Here("algorithm.ratio_clip_low")),
    ("clip_ratio_high ratio_clip_max epsilon_high", Here("algorithm.ratio_clip_high")),
    (
        "beta use_kl_loss kl_loss_coef kl_ctrl.kl_coef reference_policy_kl_penalty",
        Here("algorithm.kl_coef", "above 0: a reference policy is kept"),
    ),
    (
        "kl_loss_type kl_penalty reference_policy_kl_type",
        Here("algorithm.kl_estimator", "kl is k1 here, mse k2, low_var_kl k3; in the reward always k1"),
    ),
    ("entropy_coeff", Here("algorithm.entropy_coef")),
    ("use_kl_in_reward", Here("algorithm.kl_in", "here: reward or loss")),
    ("filter_groups.enable use_dynamic_sampling", Here("algorithm.dynamic_sampling")),
    ("filter_groups.max_num_gen_batches dynamic_sampling_max_gen_batches", Here("algorithm.max_sampling_rounds")),
    (
        "overlong_buffer.len overlong_buffer_cfg.len overlong_buffer.enable overlong_buffer_cfg.enable",
        Here("algorithm.overlong_buffer", "tokens; 0: off"),
    ),
    ("mask_truncated_completions overlong_filtering", Here("algorithm.mask_truncated")),
    (
        """vllm_importance_sampling_correction vllm_importance_sampling_cap use_importance_sampling_correction
        tis_imp_ratio_cap rollout_is rollout_is_threshold""",
        Here("algorithm.importance_cap", "0: off; not with vLLM"),
    ),
    ("router_replay.mode", Here("actor.router_replay", "R3 is rollout here; there is no R2")),
    ("mask_offpolicy_in_partial_rollout", Here("algorithm.mask_off_policy")),
    (
        "ppo_mini_batch_size",
        Here("algorithm.mini_batches", "there: prompts of a mini-batch; here: mini-batches of a step"),
    ),
    (
        "train_global_batch_size",
        Here("algorithm.mini_batches", "there: responses of a mini-batch; here: mini-batches of a step"),
    ),
    (
        "steps_per_generation",
        Here("algorithm.mini_batches", "there: micro-batches, gradient_accumulation_steps of them a mini-batch"),
    ),
    ("train_files train_data_path dataset_name", Here("data.train.path", "data.train.kind says what it is")),
    ("val_files val_data_path", Here("data.eval.path", "data.eval.kind says what it is")),
    ("prompt_key input_key", Here("data.train.prompt_field", "also of data.eval")),
    ("output_key", Here("data.train.answer_field", "also of data.eval")),
    ("dataset_config", Here("data.train.subset")),
    ("dataset_train_split train_split", Here("data.train.split")),
    ("dataset_test_split val_split", Here("data.eval.split")),
    ("data.shuffle shuffle_dataset", Here("data.train.shuffle")),
    ("apply_chat_template_kwargs", Here("data.chat_template_kwargs")),
    ("system_prompt_file", Here("data.system_prompt", "here: the text")),
    ("max_prompt_length prompt_length max_input_seq_length", Here("data.max_prompt_tokens")),
    ("filter_overlong_prompts truncation", Here("data.long_prompts", "here: drop, cut_left or error")),
    (
        """custom_reward_function custom_reward_function.path custom_reward_function.name reward_funcs
        reward_manager reward_manager.name""",
        Here("rewards.functions", 'here: [{name: python, path: "file.py:function"}]'),
    ),
    ("reward_weights", Here("rewards.functions.0.weight")),
    ("math.num_workers", Here("rewards.workers")),
    ("multi_turn.enable multi_turn.tool_config_path", Here("env.path", "a section env: docs/guides/agents.md")),
    ("max_assistant_turns max_user_turns max_rollout_turns", Here("env.max_turns")),
    ("max_tool_response_length", Here("env.max_observation_tokens")),
    ("train_batch_size num_prompts_per_step batch_size", Here("train.prompts_per_step", "over all ranks")),
    ("generation_batch_size", Here("train.prompts_per_step", "there: responses of a step")),
    (
        "per_device_train_batch_size",
        Here("train.prompts_per_step", "there: responses of a device's micro-batch; here: prompts of a step"),
    ),
    ("total_training_steps max_num_steps", Here("train.num_steps")),
    ("max_steps", Here("train.num_steps", _OPTIMIZER_STEPS_THERE)),
    (
        "total_epochs num_train_epochs max_num_epochs",
        Here("train.num_steps", "here: steps, of train.prompts_per_step prompts; there are no epochs"),
    ),
    ("grpo.seed", Here("train.seed")),
    (
        "default_local_dir output_dir checkpoint_dir log_dir experiment_name run_name wandb.name",
        Here("train.run_dir", "all files of a run are below it; its name is that of a run of W&B"),
    ),
    ("test_freq val_period", Here("eval.every", "RL steps")),
    ("eval_steps", Here("eval.every", _OPTIMIZER_STEPS_THERE)),
    ("eval_strategy val_before_train val_at_start", Here("eval.every", "also before the first step; 0: never")),
    ("max_val_samples val_max_samples", Here("eval.num_prompts")),
    (
        "val_kwargs.temperature val_kwargs.do_sample",
        Here("eval.temperature", "verl evaluates greedily without do_sample; 1.0 here, 0 is greedy"),
    ),
    ("val_kwargs.n num_generations_eval", Here("eval.samples_per_prompt")),
    ("val_kwargs.top_k", Here("eval.top_k", "unset: the rollout's")),
    ("val_kwargs.top_p", Here("eval.top_p", "unset: the rollout's")),
    ("save_freq save_period", Here("checkpoint.every", "RL steps")),
    ("save_steps", Here("checkpoint.every", _OPTIMIZER_STEPS_THERE)),
    ("save_strategy checkpointing.enabled", Here("checkpoint.every", "0: after the last step and at a signal")),
    ("save_total_limit max_actor_ckpt_to_keep keep_top_k", Here("checkpoint.keep", "the newest ones")),
    ("async_save", Here("checkpoint.asynchronous")),
    ("resume_mode resume_from_checkpoint resume_from_path", Here("checkpoint.resume")),
    ("project_name wandb.project wandb_enabled", Here("observe.wandb_project", "null: none")),
    ("tensorboard_enabled", Here("observe.tensorboard")),
    (
        "log_val_generations num_val_samples_to_print log_completions num_completions_to_print",
        Here("observe.samples_per_step", "of the steps, in samples.jsonl"),
    ),
    ("rollout_data_dir", Here("observe.save_responses", "in the run's directory")),
    ("logger report_to", Here("observe.tensorboard", "and observe.wandb_project; metrics.jsonl is always written")),
    ("nnodes num_nodes", Here("cluster.nodes", "and -N of sbatch")),
    ("n_gpus_per_node gpus_per_node", Here("cluster.ranks_per_node", "and -n of the launcher")),
    ("critic.* critic_warmup algorithm.gamma algorithm.lam max_critic_ckpt_to_keep", Here("", "no critic")),
    (
        """reward_model.enable reward_model.strategy reward_model.model.* reward_model.micro_batch_size_per_gpu
        reward_model.max_length""",
        Here("", "no reward model; a Python reward may call a service"),
    ),
    ("ppo_epochs num_iterations", Here("", "a step trains once on each response")),
    ("kl_ctrl.type kl_ctrl.target_kl kl_ctrl.horizon", Here("", "algorithm.kl_coef stays as it is")),
    ("clip_ratio_c ratio_clip_c delta", Here("", "the ratio's loss has no bound for negative advantages")),
    (
        """use_dynamic_bsz log_prob_use_dynamic_bsz use_remove_padding sequence_packing.enabled dynamic_batching.enabled
        balance_batch filter_overlong_prompts_workers""",
        Here("", "rows are always packed by their tokens"),
    ),
    (
        """param_offload cpu_offload actor.strategy ref.strategy fsdp_size reshard_after_forward
        forward_prefetch dtensor_cfg.enabled dtensor_cfg._v2 megatron_cfg.enabled deepspeed""",
        Here("", "the actor is Megatron-core's; its weights stay on the device"),
    ),
    (
        """use_torch_compile use_fused_kernels use_liger use_liger_kernel attn_implementation entropy_checkpointing
        entropy_from_logits_with_chunking""",
        Here("", "kernels follow actor.layer_spec and rollout.kernels"),
    ),
    (
        """rollout.mode load_format layered_summon calculate_log_probs
        vllm_mode vllm_enable_sleep_mode async_engine hybrid_engine colocated.*""",
        Here("", "engines share the ranks' devices, and weight sync sets their weights"),
    ),
    ("use_shm trust_remote_code use_mbridge use_dist_checkpointing", Here("", "model.path is read as it is")),
    ("save_contents load_contents default_hdfs_dir", Here("", "checkpoints are whole, in train.run_dir")),
    ("metric_name higher_is_better", Here("", "the newest checkpoints are kept, not the best")),
    (
        "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor overlong_buffer_cfg.log",
        Here("", "the penalty grows to 1"),
    ),
    ("reward_fn_key return_raw_chat return_raw_input_ids", Here("", "a reward gets all columns of its row")),
    ("gen_batch_size filter_groups.metric", Here("", "a round has train.prompts_per_step prompts; sums are compared")),
    ("async_grpo.*", Here("", "training is synchronous")),
    ("teacher.*", Here("", "a teacher has the policy's tokenizer, and the actor's layout, type and micro-batches")),
    ("val_only", Here("", "the command megatron-tlt eval")),
    ("val_batch_size per_device_eval_batch_size", Here("", "all prompts of an evaluation run at once")),
    ("profiler.* global_profiler.* ray_kwargs.*", Here("", "megatron-tlt timeline shows every phase; no Ray")),
    ("logging_steps monitor_gpus", Here("", "each step is a row of metrics.jsonl")),
)
_BY_NAME = {name: here for names, here in ELSEWHERE for name in names.split()}
_BY_TREE = {name.removesuffix("*"): here for name, here in _BY_NAME.items() if name.endswith(".*")}


def name_here(root: type[BaseModel], parent: str, path: str) -> Here | None:
    """The setting of `root` that another system calls `path`; None where that is not known.

    `parent`: the path's part that is a section here, if there is one; of settings of one name it has the first. A
    setting that has no counterpart is a `Here` without a path.
    """
    known, parts = {*paths_of(root)}, path.lstrip("+").split(".")  # Hydra adds a key by `+key=value`
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        below = (found for tree, found in _BY_TREE.items() if end.startswith(tree))
        here = _BY_NAME.get(end) or next(below, None)
        if here is not None and not here.path:
            return here
        here = here or Here(end if start and "." in end else "")
        own = f"{parent}.{here.path.rpartition('.')[2]}" if "." not in end else here.path
        for wanted in (own, here.path):
            if wanted in known:
                return Here(wanted, here.note)
    return None


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Path and value of every setting in `value`, which stands at `path`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}", inner)
    else:
        yield path, value

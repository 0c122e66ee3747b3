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
    note: str = ""


# Names with white space between them, each the end of its path there: the longest end that is found decides.
ELSEWHERE: tuple[tuple[str, Here], ...] = (
    ("model_name_or_path model_name", Here("model.path", "no conversion")),
    ("max_model_len max_total_sequence_length", Here("model.max_context")),
    ("tensor_model_parallel_size", Here("actor.tp")),
    ("pipeline_model_parallel_size", Here("actor.pp")),
    ("context_parallel_size", Here("actor.cp")),
    ("expert_model_parallel_size", Here("actor.ep")),
    ("recompute_granularity", Here("actor.recompute")),
    ("optimizer_offload grad_offload", Here("actor.offload_optimizer", "both")),
    (
        "ppo_max_token_len_per_gpu",
        Here("actor.micro_batch_tokens", "with actor.cp the budget of all ranks of a replica together"),
    ),
    (
        "ppo_micro_batch_size_per_gpu train_micro_batch_size gradient_accumulation_steps",
        Here("actor.micro_batch_tokens", "here: tokens of a micro-batch; how many there are follows"),
    ),
    ("learning_rate optim.lr", Here("optimizer.lr")),
    ("rollout.name use_vllm", Here("rollout.backend", "here: embedded, vllm or trtllm")),
    ("rollout.tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size", Here("rollout.tp")),
    ("n num_generations num_generations_per_prompt num_samples group_size", Here("rollout.samples_per_prompt")),
    ("max_response_length max_completion_length max_new_tokens", Here("rollout.max_tokens")),
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
        "adv_estimator loss_agg_mode loss_type",
        Here("algorithm.name", "advantage and loss together; which is which: docs/guides/algorithms.md"),
    ),
    ("epsilon clip_ratio", Here("algorithm.ratio_clip_low", "the upper one is algorithm.ratio_clip_high")),
    ("clip_ratio_low ratio_clip_min", Here("algorithm.ratio_clip_low")),
    ("clip_ratio_high ratio_clip_max epsilon_high", Here("algorithm.ratio_clip_high")),
    (
        "beta use_kl_loss kl_loss_coef kl_ctrl.kl_coef reference_policy_kl_penalty",
        Here("algorithm.kl_coef", "above 0: a reference policy is kept"),
    ),
    ("use_kl_in_reward", Here("algorithm.kl_in", "here: reward or loss")),
    ("filter_groups.enable use_dynamic_sampling", Here("algorithm.dynamic_sampling")),
    ("mask_offpolicy_in_partial_rollout", Here("algorithm.mask_off_policy")),
    (
        "ppo_mini_batch_size",
        Here("algorithm.mini_batches", "there: prompts of a mini-batch; here: mini-batches of a step"),
    ),
    (
        "train_global_batch_size",
        Here("algorithm.mini_batches", "there: responses of a mini-batch; here: mini-batches of a step"),
    ),
    ("train_files dataset_name", Here("data.train.path", "data.train.kind says what it is")),
    ("val_files", Here("data.eval.path", "data.eval.kind says what it is")),
    ("max_prompt_length", Here("data.max_prompt_tokens")),
    ("filter_overlong_prompts truncation", Here("data.long_prompts", "here: drop, cut_left or error")),
    (
        "custom_reward_function custom_reward_function.path custom_reward_function.name reward_funcs",
        Here("rewards.functions", 'here: [{name: python, path: "file.py:function"}]'),
    ),
    ("max_assistant_turns max_rollout_turns", Here("env.max_turns")),
    ("max_tool_response_length", Here("env.max_observation_tokens")),
    ("train_batch_size num_prompts_per_step batch_size", Here("train.prompts_per_step", "over all ranks")),
    (
        "per_device_train_batch_size",
        Here("train.prompts_per_step", "there: responses of a device's micro-batch; here: prompts of a step"),
    ),
    ("total_training_steps max_steps max_num_steps", Here("train.num_steps")),
    (
        "total_epochs num_train_epochs max_num_epochs",
        Here("train.num_steps", "here: steps, of train.prompts_per_step prompts; there are no epochs"),
    ),
    ("default_local_dir output_dir checkpoint_dir", Here("train.run_dir", "checkpoints/ is below it")),
    ("test_freq eval_steps val_period", Here("eval.every", "RL steps")),
    ("val_kwargs.temperature", Here("eval.temperature")),
    ("val_kwargs.n", Here("eval.samples_per_prompt")),
    ("val_kwargs.top_k", Here("eval.top_k", "unset: the rollout's")),
    ("val_kwargs.top_p", Here("eval.top_p", "unset: the rollout's")),
    ("save_freq save_steps save_period", Here("checkpoint.every", "RL steps")),
    ("save_total_limit", Here("checkpoint.keep")),
    ("resume_mode resume_from_checkpoint", Here("checkpoint.resume")),
    ("logger report_to", Here("observe.tensorboard", "and observe.wandb_project; metrics.jsonl is always written")),
    ("nnodes num_nodes", Here("cluster.nodes", "and -N of sbatch")),
    ("n_gpus_per_node gpus_per_node", Here("cluster.ranks_per_node", "and -n of the launcher")),
)
_BY_NAME = {name: here for names, here in ELSEWHERE for name in names.split()}


def name_here(root: type[BaseModel], parent: str, path: str) -> Here | None:
    """The setting of `root` that another system calls `path`; None where that is not known.

    `parent`: the path's part that is a section here, if there is one; of settings of one name it has the first.
    """
    known, parts = {*paths_of(root)}, path.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        here = _BY_NAME.get(end, Here(end if start and "." in end else ""))
        own = f"{parent}.{here.path.rpartition('.')[2]}"
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

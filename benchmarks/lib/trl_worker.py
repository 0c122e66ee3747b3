"""One process of TRL's GRPOTrainer, in TRL's own environment: `proof_trl.py` starts as many as the run has ranks.

    torchrun --nproc-per-node 2 benchmarks/lib/trl_worker.py JOB

JOB is a JSON file (`proof_trl.Job`); the first process writes its result, the seconds and logged figures of every step,
to `out`. The trainer samples, scores and updates by itself; prompts, reward function, learning-rate schedule and the
settings of the loss are the run's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lib.prompt_rows import Row, RowReward, read_rows
from megatron_tlt.config.data import RewardSection


class StepClock(TrainerCallback):
    """Seconds of every step; keeps the policy of each `save_every`-th step (0: of none) in `policies`/STEP."""

    def __init__(self, save_every: int, policies: Path) -> None:
        self.seconds: list[float] = []
        self.save_every, self.policies = save_every, policies
        self._step = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, processing_class: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._step)
        if self.save_every and state.global_step % self.save_every == 0 and state.is_world_process_zero:
            for part in (model, processing_class):
                part.save_pretrained(self.policies / f"{state.global_step:06d}")


def reward_function(section: RewardSection) -> Any:
    """The run's reward in TRL's signature: completions are messages; texts without a template."""
    value = RowReward(section)

    def reward(prompts: list[Any], completions: list[Any], fields: list[str], **_: Any) -> list[float]:
        texts = [done if isinstance(done, str) else str(done[-1]["content"]) for done in completions]
        return [value(row, text) for row, text in zip(fields, texts, strict=True)]

    return reward


def check_tokens(rows: list[Row], tokenizer: Any) -> None:
    """Raises SystemExit where TRL would feed other tokens than the run does."""
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            ids = tokenizer(text=prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        if list(ids) != row["token_ids"]:
            raise SystemExit(f"trl_worker: other tokens for {prompt!r}")


def settings(job: dict[str, Any]) -> GRPOConfig:
    """The run's settings under TRL's names: weights in fp32, products in bf16 by autocast where the run's are, no
    gradient checkpointing, no reference policy.
    """
    per_step = job["prompts_per_step"] * job["samples_per_prompt"]
    micro = job["micro_batch"]
    return GRPOConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=job["bf16"],
        activation_checkpointing=False,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo",
        max_steps=job["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_step // (micro * dist_size()),
        num_generations=job["samples_per_prompt"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        shuffle_dataset=False,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=job["clip"][0],
        epsilon_high=job["clip"][1],
        learning_rate=job["lr"],
        max_grad_norm=job["clip_grad"],
        seed=job["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def dist_size() -> int:
    """Processes of this job."""
    return dist.get_world_size()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = read_rows(Path(job["rows"]))
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    check_tokens(rows, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), job["lr"], betas=job["betas"], eps=job["eps"], weight_decay=0.0)
    warmup = max(1, job["warmup_steps"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    clock = StepClock(job["save_every"], Path(job["policies"]))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward_function(RewardSection.model_validate(job["rewards"]))],
        args=settings(job),
        train_dataset=Dataset.from_list([{k: row[k] for k in ("prompt", "fields")} for row in rows]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        callbacks=[clock],
    )
    trainer.train()
    if dist.get_rank() == 0:
        logs = [line for line in trainer.state.log_history if "reward" in line]
        Path(job["out"]).write_text(json.dumps({"seconds": clock.seconds, "logs": logs}))


if __name__ == "__main__":
    main()

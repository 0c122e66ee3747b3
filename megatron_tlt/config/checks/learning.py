"""Cross-checks of learning: algorithm, prompts, rewards, optimizer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_tlt.config.actor import MLP_TARGETS, LoraSection, OptimizerSection
from megatron_tlt.config.algorithm import AlgorithmSection
from megatron_tlt.config.checks.layout import GROUPED, grouped_step
from megatron_tlt.config.data import UNREAD, PromptSourceConfig, RewardConfig
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.paths import FORMATS, has_form_of_name
from megatron_tlt.config.planning.parameters import element_bytes, total_parameters
from megatron_tlt.config.root import Config, SftSection, TrainingConfig
from megatron_tlt.errors import ConfigProblem, Problems

FULL_TRAINING_LR = 5e-6  # the recipes that train all weights have 5e-7 to 1e-6, reports up to 5e-6
# Of all weights: GRPO of 135M parameters learns at 2e-5, at 5e-5 in some tasks, and at 2e-4 loses all.
USUAL_RL_LR, HIGHEST_RL_LR = 2e-5, 5e-5
_TOKEN_CLIP = 0.01  # the least clip of a token's ratio; gspo's clips of a response's mean are some 3e-4
SMALL_MODEL = 50_000_000  # parameters: smaller models learn at higher rates
_COMMIT = re.compile(r"/snapshots/[0-9a-f]{40}$")  # of a repository's directory in the hub's cache
# Of procedural tasks, with what they take for right in every prompt.
_BAD_VERIFIERS = {
    "coin_flip": "0 for every probability below 1",
    "complex_arithmetic": "nan",
    "game_of_life_halting": "any text",
    "puzzle24": "any four numbers that make 24, as 6*4*1*1, whichever the prompt names",
}
# Their baseline is the rest of the group, so a group of one response has no advantage.
GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "rloo", "gspo")


def check_algorithm(config: Config) -> Problems:
    """Group size, clipping, KL placement and DAPO's extras."""
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.samples_per_prompt < 2 and (algorithm.name in GROUP_RELATIVE or _distills_beside_rewards(config)):
        allowed = f"must be >= 2: {algorithm.name} compares the rewards of the responses to one prompt"
        if algorithm.name == "distill":
            allowed += " (1 is allowed where all rewards.functions have weight 0 and algorithm.overlong_buffer is 0)"
        yield ConfigProblem("rollout.samples_per_prompt", rollout.samples_per_prompt, allowed)
    if algorithm.dynamic_sampling and rollout.samples_per_prompt < 2:
        allowed = "needs rollout.samples_per_prompt >= 2, or every group has equal rewards and is dropped"
        yield ConfigProblem("algorithm.dynamic_sampling", True, allowed)
    if rollout.temperature == 0:
        allowed = "must be > 0 for training: greedy responses to a prompt are all equal (evaluations: eval.temperature)"
        yield ConfigProblem("rollout.temperature", rollout.temperature, allowed)
    if algorithm.ratio_clip_low is not None and algorithm.ratio_clip_low >= 1:
        allowed = "must be < 1: the ratio's lower bound is 1 - low"
        yield ConfigProblem("algorithm.ratio_clip_low", algorithm.ratio_clip_low, allowed)
    if algorithm.kl_in == "reward" and algorithm.kl_weight == 0:
        allowed = "needs algorithm.kl_coef > 0 (with 0 no reference policy is kept and there is no KL term)"
        yield ConfigProblem("algorithm.kl_in", "reward", allowed)
    if algorithm.overlong_buffer >= rollout.max_tokens:
        allowed = f"must be < rollout.max_tokens ({rollout.max_tokens})"
        yield ConfigProblem("algorithm.overlong_buffer", algorithm.overlong_buffer, allowed)
    if 0 < algorithm.importance_cap < 1:
        allowed = "must be 0 (off) or >= 1: a cap below 1 shrinks tokens on which both sides agree"
        yield ConfigProblem("algorithm.importance_cap", algorithm.importance_cap, allowed)


def _distills_beside_rewards(config: Config) -> bool:
    """Whether a distillation has advantages of rewards, too."""
    algorithm, functions = config.algorithm, config.rewards.functions
    has_rewards = any(function.weight for function in functions) or algorithm.overlong_buffer > 0
    return algorithm.name == "distill" and has_rewards


def algorithm_warnings(algorithm: AlgorithmSection) -> list[str]:
    """Settings that do something else than their names say, or nothing."""
    own = [warning(algorithm) for warning in (kl_estimator_warning, kl_in_warning, ratio_warning, clip_warning)]
    return [*filter(None, own), *without_effect(algorithm)]


def kl_estimator_warning(algorithm: AlgorithmSection) -> str | None:
    """The warning where the KL term of the loss pulls nowhere on average; None where it does not.

    The gradient of k1 = log policy - log reference is that of log policy, whose expectation under the policy is 0.
    """
    if algorithm.kl_estimator != "k1" or algorithm.kl_in != "loss" or not algorithm.kl_weight:
        return None
    if algorithm.name == "distill":  # its KL is part of the advantages
        return None
    return (
        "algorithm.kl_estimator = k1 with algorithm.kl_in = loss: the gradient of this term is 0 on average: noise that"
        " holds no policy near the reference. Use k2 (its gradient is the KL's), k3, or algorithm.kl_in = reward"
    )


def kl_in_warning(algorithm: AlgorithmSection) -> str | None:
    """The warning where a KL in the reward is divided by the deviation of such rewards; None where it is not."""
    if algorithm.kl_in != "reward" or algorithm.name not in ("grpo", "dapo", "gspo"):
        return None
    return (
        f"algorithm.kl_in = reward with algorithm.name = {algorithm.name}, which divides by a group's deviation: where"
        " its rewards are equal the KL pulls at full size, whatever algorithm.kl_coef is. Use algorithm.kl_in = loss,"
        " or dr_grpo or rloo, which divide by no deviation"
    )


def without_effect(algorithm: AlgorithmSection) -> list[str]:
    """Warnings of settings that differ from their defaults and that another one leaves without effect."""
    name, estimator, default = algorithm.name, algorithm.kl_estimator, AlgorithmSection()
    found = []
    if algorithm.mini_batches == 1:
        clips = {"low": algorithm.ratio_clip_low, "high": algorithm.ratio_clip_high}
        only = "with algorithm.mini_batches = 1: the ratio is 1 in a step's only update"
        found += [(f"ratio_clip_{side} = {clip:g}", only) for side, clip in clips.items() if clip is not None]
    if estimator != default.kl_estimator:
        if name == "distill":
            found.append((f"kl_estimator = {estimator}", "with algorithm.name = distill, whose advantages take k1"))
        elif not algorithm.kl_weight:
            found.append((f"kl_estimator = {estimator}", "without algorithm.kl_coef: there is no KL term"))
        elif algorithm.kl_in == "reward" and estimator != "k1":
            found.append((f"kl_estimator = {estimator}", "with algorithm.kl_in = reward, which takes k1"))
    if algorithm.advantage_eps != default.advantage_eps and name in ("rloo", "dr_grpo"):
        why = f"with algorithm.name = {name}, which divides by no deviation"
        found.append((f"advantage_eps = {algorithm.advantage_eps:g}", why))
    if algorithm.max_sampling_rounds != default.max_sampling_rounds and not algorithm.dynamic_sampling:
        rounds = f"max_sampling_rounds = {algorithm.max_sampling_rounds}"
        found.append((rounds, "without algorithm.dynamic_sampling"))
    return [f"algorithm.{setting} has no effect {why}" for setting, why in found]


def ratio_warning(algorithm: AlgorithmSection) -> str | None:
    """The warning of gspo where every ratio is 1, so that there is none of a whole response; None otherwise."""
    if algorithm.name != "gspo" or algorithm.mini_batches > 1:
        return None
    return (
        "algorithm.name = gspo with algorithm.mini_batches = 1: every ratio is 1, so the gradient is that of grpo, but "
        "for the correction of the engine's log-probs (algorithm.importance_cap), which is of a whole response"
    )


def clip_warning(algorithm: AlgorithmSection) -> str | None:
    """The warning where a clip of tokens' ratios is given for responses' ratios, or the other way round; None else."""
    is_gspo = algorithm.name == "gspo"
    given = {"low": algorithm.ratio_clip_low, "high": algorithm.ratio_clip_high}
    wrong = {side: clip for side, clip in given.items() if clip is not None and (clip >= _TOKEN_CLIP) == is_gspo}
    if not wrong or algorithm.mini_batches == 1:  # one update: every ratio is 1
        return None
    clips = ", ".join(f"algorithm.ratio_clip_{side} = {clip:g}" for side, clip in wrong.items())
    whose = "a whole response's ratio, usually at 3e-4 and 4e-4" if is_gspo else "a token's ratio, usually at 0.2"
    return f"{clips}: {algorithm.name} clips {whose}; null takes the algorithm's own"


def check_data(config: Config) -> Problems:
    """Sources name what they need; an evaluation has prompts and draws of its own."""
    for path, source in config.data.sources:
        yield from _check_source(path, source, config.env is not None)
        yield from _check_verifiers(f"{path}.tasks", source, config)
    train, held_out = config.data.train, config.data.eval
    samples, is_greedy = config.eval.samples_per_prompt, config.eval.temperature == 0
    if held_out is not None and samples > 1 and is_greedy and config.env is None:
        allowed = "must be 1 with eval.temperature = 0: greedy responses to one prompt are all the same"
        yield ConfigProblem("eval.samples_per_prompt", samples, allowed)
    if held_out is None or train is UNREAD:
        return
    both = [(_rows(s.path), s.subset, s.split or "train") for s in (train, held_out) if s.path is not None]
    if train.kind != "tasks" and len(both) == 2 and both[0] == both[1]:
        allowed = "must differ from data.train.path (or in its split), or evaluation uses the training prompts"
        yield ConfigProblem("data.eval.path", held_out.path, allowed)


def check_records(section: SftSection | None) -> Problems:
    """Held-out records of fine-tuning are not those that are trained on."""
    files = [] if section is None else section.files
    # Of a file all records are read, whatever the split.
    is_file = [path.endswith(FORMATS) or Path(path).is_file() for _, path, _ in files]
    both = [(_rows(path), None if whole else split) for (_, path, split), whole in zip(files, is_file, strict=True)]
    if len(both) == 2 and both[0] == both[1]:
        allowed = "must differ from sft.train_path (or in its split), or evaluation uses the training records"
        yield ConfigProblem("sft.eval_path", files[1][1], allowed)


def _rows(path: str) -> str:
    """A path, or a name on the hub, in one spelling: without links, and without the revision."""
    if has_form_of_name(path) and not os.path.lexists(path):
        return path.partition("@")[0]
    return _COMMIT.sub("", os.path.realpath(path))


def _check_source(path: str, source: PromptSourceConfig, has_env: bool) -> Problems:
    if source.kind != "hf":
        for name in ("subset", "split"):
            if getattr(source, name) is not None:
                yield ConfigProblem(f"{path}.{name}", getattr(source, name), f"needs kind: hf, found {source.kind}")
    if source.answer_pattern is not None:
        yield from _check_pattern(f"{path}.answer_pattern", source.answer_pattern, needs_group=True)
    has_file = source.kind not in ("tasks", "env")
    if has_file and source.path is None:
        yield ConfigProblem(f"{path}.path", None, f"is required with kind: {source.kind}")
    if not has_file and source.path is not None:
        yield ConfigProblem(f"{path}.path", source.path, f"has no meaning with kind: {source.kind}")
    if source.kind == "env" and not has_env:
        yield ConfigProblem(f"{path}.kind", "env", "needs an environment: env.kind or env.path")
    if source.kind == "tasks":
        yield from _check_tasks(f"{path}.tasks", source)
    elif source.tasks:
        allowed = f"has no meaning with kind: {source.kind}; if a file of `defaults` sets it, add tasks: [] to {path}"
        yield ConfigProblem(f"{path}.tasks", [t.name for t in source.tasks], allowed)


def _check_tasks(path: str, source: PromptSourceConfig) -> Problems:
    if not source.tasks:
        yield ConfigProblem(path, [], "needs at least one task with kind: tasks")
    kinds = [(task.name, task.params) for task in source.tasks]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            allowed = "is there before with the same params: give one of them the sum of the weights"
            yield ConfigProblem(f"{path}.{index}.name", kind[0], allowed)


def _check_verifiers(path: str, source: PromptSourceConfig, config: Config) -> Problems:
    """Tasks' own verifiers, where the reward `task` or the environment `retry` asks them."""
    is_asked = any(function.name == "task" for function in config.rewards.functions)
    if not is_asked and (config.env is None or config.env.kind != "retry"):
        return
    for index, task in enumerate(source.tasks):
        if (why := _BAD_VERIFIERS.get(task.name)) is not None:
            allowed = f"cannot be judged by its own verifier, which accepts {why}: use a reward of your own (python)"
            yield ConfigProblem(f"{path}.{index}.name", task.name, allowed)


def check_rewards(config: Config) -> Problems:
    """Every reward function has its parameters and prompts it can judge."""
    functions = config.rewards.functions
    if not functions:
        if config.algorithm.name != "distill":
            yield ConfigProblem("rewards.functions", [], "needs at least one reward function")
        if config.data.eval is not None:
            allowed = "needs at least one reward function with data.eval: accuracy is what an evaluation measures"
            yield ConfigProblem("rewards.functions", [], allowed)
    elif all(function.threshold is None for function in functions):
        yield ConfigProblem("rewards.functions", "no threshold", "at least one must, or accuracy has no meaning")
    for index, function in enumerate(functions):
        path = f"rewards.functions.{index}"
        if function.name == "task":
            yield from _check_task_reward(path, config)
        if function.name == "env" and config.env is None:
            yield ConfigProblem(f"{path}.name", "env", "needs an environment: env.kind or env.path")
        yield from _check_reward_parameters(path, function)


def _check_task_reward(path: str, config: Config) -> Problems:
    for name, source in config.data.sources:
        if source.kind != "tasks":
            others = "env, format or python" if source.kind == "env" else "math, exact, format or python"
            allowed = f"needs {name}.kind: tasks (it is {source.kind!r}); use {others}"
            yield ConfigProblem(f"{path}.name", "task", allowed)


def _check_reward_parameters(path: str, function: RewardConfig) -> Problems:
    if function.name == "python":
        module, _, name = (function.path or "").rpartition(":")
        if not (module and name):
            yield ConfigProblem(
                f"{path}.path", function.path, "must be package.module:function or path/to/file.py:function"
            )
    elif function.path is not None or function.params:
        yield ConfigProblem(f"{path}.name", function.name, "path and params are for name: python")
    if function.name != "env" and function.turns != "sum":
        yield ConfigProblem(f"{path}.turns", function.turns, "is for name: env")
    if function.name == "format" and function.pattern is None:
        yield ConfigProblem(f"{path}.pattern", None, "is required with name: format")
    if function.pattern is not None:
        needs_group = function.name in ("task", "math", "exact")
        yield from _check_pattern(f"{path}.pattern", function.pattern, needs_group)


def _check_pattern(path: str, pattern: str, needs_group: bool) -> Problems:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield ConfigProblem(path, pattern, f"is no regular expression: {error}")
        return
    if needs_group and groups < 1:
        yield ConfigProblem(path, pattern, "needs a group (...) around the answer")


def check_lora(config: TrainingConfig, shape: ArchitectureConfig | None) -> Problems:
    """Adapters that nothing can serve, or that are no smaller than what they adapt."""
    lora = config.actor.lora
    if lora is None:
        return
    if len(set(lora.targets)) < len(lora.targets):
        yield ConfigProblem("actor.lora.targets", lora.targets, "must name each matrix once")
    if shape is None:
        return
    least, name = min(_adapted_widths(lora, shape))
    if lora.rank >= least:
        yield ConfigProblem("actor.lora.rank", lora.rank, f"must be < {least}, the model's {name} width")
    step = grouped_step(element_bytes(config.actor.dtype))
    if shape.num_experts and set(lora.targets) & set(MLP_TARGETS) and lora.rank % step:
        allowed = f"must be a multiple of {step} for experts with actor.dtype: {config.actor.dtype}: {GROUPED}"
        yield ConfigProblem("actor.lora.rank", lora.rank, allowed)


def _adapted_widths(lora: LoraSection, shape: ArchitectureConfig) -> Iterator[tuple[int, str]]:
    """Sizes and names of both sides of the matrices that get adapters."""
    yield shape.hidden_size, "hidden"
    if {"q_proj", "o_proj"} & {*lora.targets}:
        yield shape.num_heads * shape.head_dim, "query"
    if {"k_proj", "v_proj"} & {*lora.targets}:
        yield shape.num_kv_heads * shape.head_dim, "key/value"
    if not {*MLP_TARGETS} & {*lora.targets}:
        return
    if len(shape.moe_layers) < shape.num_layers:
        yield shape.intermediate_size, "MLP"
    if shape.moe_layers:
        yield shape.moe_intermediate_size, "expert"
        if shape.shared_expert_intermediate_size:
            yield shape.shared_expert_intermediate_size, "shared expert"


def learning_rate_warning(config: TrainingConfig, shape: ArchitectureConfig | None) -> str | None:
    """The warning where the learning rate is far below or above what trains such a model; None where it is not.

    High ones are looked for in RL alone, and not in small models: fine-tuning and small models take higher ones. Low
    ones are those of adapters, and the default, which is RL's, in fine-tuning.
    """
    optimizer, lora = config.optimizer, config.actor.lora
    if optimizer.name != "adam":
        return None
    given = f"optimizer.lr = {optimizer.lr:g} is"
    if lora is not None and optimizer.lr < FULL_TRAINING_LR:
        return f"{given} usual for full training; adapters learn with about ten times as much ({10 * optimizer.lr:g})"
    if config.records is not None and optimizer.lr < FULL_TRAINING_LR:
        return f"{given} usual for RL; fine-tuning of all weights takes about 1e-5, of small models more"
    times, what = (1, "all") if lora is None else (10, "adapters")
    usual, highest = times * USUAL_RL_LR, times * HIGHEST_RL_LR
    if config.rl is None or shape is None or optimizer.lr <= highest or total_parameters(shape) < SMALL_MODEL:
        return None
    return (
        f"{given} high for RL of {what} of {total_parameters(shape):.3g} parameters, usually 1e-6 to {usual:g}: the "
        "policy may lose what it knows in a few steps. The 2e-4 of configs/quickstart.yaml is for 2.4M parameters"
    )


def warmup_warning(config: TrainingConfig) -> str | None:
    """The warning where a constant learning rate is not reached; with a decaying one that is refused."""
    warmup, steps = config.optimizer.warmup_steps, config.optimizer_steps
    if warmup <= steps:
        return None
    reached = config.optimizer.lr * steps / warmup
    return (
        f"optimizer.warmup_steps = {warmup} exceeds the {steps} optimizer steps: the last one's rate is {reached:.3g}"
    )


def check_optimizer(optimizer: OptimizerSection, total_steps: int) -> Problems:
    """Learning rate and schedule; `total_steps` counts optimizer steps of the run."""
    if optimizer.min_lr > optimizer.lr:
        yield ConfigProblem("optimizer.min_lr", optimizer.min_lr, f"must be <= optimizer.lr ({optimizer.lr})")
    elif optimizer.min_lr and optimizer.schedule == "constant":
        allowed = "must be 0 with optimizer.schedule = constant: it is where linear and cosine end"
        yield ConfigProblem("optimizer.min_lr", optimizer.min_lr, allowed)
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= total_steps:
        allowed = f"must be < the run's optimizer steps ({total_steps})"
        yield ConfigProblem("optimizer.warmup_steps", optimizer.warmup_steps, allowed)

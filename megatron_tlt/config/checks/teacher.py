"""Cross-checks of distillation: settings that contradict it, and a teacher that does not fit the actor's layout."""

from __future__ import annotations

from megatron_tlt.config.checks.layout import check_experts, pp_problems, tp_problems
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.root import Config
from megatron_tlt.errors import ConfigProblem, Problems


def check_teacher(config: Config, shape: ArchitectureConfig | None) -> Problems:
    """`shape` is the policy's; the teacher's is `algorithm.teacher_shape`, None where it is unknown."""
    algorithm = config.algorithm
    if algorithm.name != "distill":
        if algorithm.teacher is not None:
            yield ConfigProblem("algorithm.teacher", algorithm.teacher, "needs algorithm.name: distill")
        return
    if algorithm.teacher is None:
        yield ConfigProblem("algorithm.teacher", None, "is required with algorithm.name: distill")
    if algorithm.kl_coef == 0:
        yield ConfigProblem("algorithm.kl_coef", 0, "must be > 0 with algorithm.name: distill: the teacher's weight")
    if algorithm.kl_in == "reward":
        allowed = "must be 'loss' with algorithm.name: distill, whose KL is in each token's advantage"
        yield ConfigProblem("algorithm.kl_in", "reward", allowed)
    if algorithm.dynamic_sampling:
        allowed = "must be false with algorithm.name: distill: responses of equal rewards have a gradient, too"
        yield ConfigProblem("algorithm.dynamic_sampling", True, allowed)
    if algorithm.teacher_shape is not None:
        yield from _check_shape(config, algorithm.teacher_shape, shape)


def _check_shape(config: Config, teacher: ArchitectureConfig, shape: ArchitectureConfig | None) -> Problems:
    """The teacher's sizes: its vocabulary, and its place in the layout, which is the actor's."""
    path = config.algorithm.teacher
    if shape is not None and teacher.vocab_size < shape.vocab_size:
        allowed = f"has {teacher.vocab_size} rows of embedding, fewer than the policy's {shape.vocab_size}"
        yield ConfigProblem("algorithm.teacher", path, f"{allowed}: the policy may draw a token that it cannot read")
    of_policy = _layout_problems(config, shape)
    for problem in _layout_problems(config, teacher):
        if problem not in of_policy:
            allowed = f"does not fit the actor's layout: {problem.path} = {problem.value} {problem.allowed}"
            yield ConfigProblem("algorithm.teacher", path, allowed)


def _layout_problems(config: Config, shape: ArchitectureConfig | None) -> list[ConfigProblem]:
    actor = config.actor
    problems = [*tp_problems(shape, "actor.tp", actor.tp), *pp_problems(shape, "actor.pp", actor.pp)]
    return problems + ([*check_experts(config, shape)] if shape is not None and shape.num_experts else [])

"""A teacher of distillation on this machine: its shape, for the memory plan, and whether it can score the policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.config.root import Config
from megatron_tlt.data.tokenizer import HFTokenizer, has_tokenizer
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem
from megatron_tlt.models.hf.config import ModelConfig

if TYPE_CHECKING:
    from megatron_tlt.data.hub import RootT

_FIELD = "algorithm.teacher"


def with_teacher_shape(config: RootT, described: str | None = None) -> RootT:
    """`config` with `algorithm.teacher_shape` of a teacher that is on this machine and can be read. `described`: the
    directory of its config.json, where the rest of it is not here.
    """
    if config.rl is None or (model := _read(described or config.rl.algorithm.teacher)[0]) is None:
        return config
    algorithm = config.rl.algorithm.with_teacher_shape(model.architecture)
    return config.model_copy(update={"algorithm": algorithm})


def teacher_shape(config: Config) -> ModelConfig | None:
    """The description of a teacher that is on this machine and can be read."""
    return _read(config.algorithm.teacher)[0]


def teacher_problems(config: Config) -> list[ConfigProblem]:
    """A teacher that is on this machine and cannot be read, has another tokenizer or too few positions. Reads no
    weights.
    """
    path = config.algorithm.teacher
    model, problems = _read(path)
    if model is None or path is None:
        return problems
    if (most := model.max_position_embeddings) < config.model.max_context:
        allowed = f"has {most} positions, fewer than model.max_context ({config.model.max_context})"
        problems.append(ConfigProblem(_FIELD, path, allowed))
    return problems + _tokenizer_problems(config, path)


def _read(path: str | None) -> tuple[ModelConfig | None, list[ConfigProblem]]:
    """The teacher's description; None without a teacher here, or with the reason why it cannot be read."""
    if path is None or not Path(path).exists():
        return None, []
    try:
        return ModelConfig.from_hf(path), []
    except (CheckpointError, ConfigError) as error:
        return None, [ConfigProblem(_FIELD, path, str(error))]


def _tokenizer_problems(config: Config, teacher: str) -> list[ConfigProblem]:
    """Tokens of the policy that are other ids to the teacher, which would score another text."""
    source = config.model.tokenizer_path
    if not has_tokenizer(Path(source)):  # not on this machine, or a problem of its own
        return []
    if not has_tokenizer(Path(teacher)):
        allowed = "has no tokenizer files, which would show that its tokens are the policy's"
        return [ConfigProblem(_FIELD, teacher, allowed)]
    try:
        mine, theirs = HFTokenizer(source).vocabulary(), HFTokenizer(teacher).vocabulary()
    except CheckpointError as error:
        return [ConfigProblem(_FIELD, teacher, str(error))]
    wrong = [token for token, number in mine.items() if theirs.get(token) != number]
    if not wrong:
        return []
    first = min(wrong, key=lambda token: mine[token])
    there = f"id {theirs[first]}" if first in theirs else "no token"
    allowed = (
        f"must have the policy's tokenizer ({source}): {len(wrong)} of its {len(mine)} tokens differ, the first is "
        f"{first!r} with id {mine[first]}, {there} there"
    )
    return [ConfigProblem(_FIELD, teacher, allowed)]

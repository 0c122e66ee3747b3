"""The tokenizer on this machine against the model: tokens without a row in the embedding, and turns that never end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data.completions import encoded_records, read_sequences
from megatron_tlt.data.tokenizer import HFTokenizer, end_tokens, has_tokenizer, read_tokenizer
from megatron_tlt.data.turn_form import PROMPT, TURN, read_turn_form
from megatron_tlt.envs.build import environment_tools
from megatron_tlt.errors import CheckpointError, ConfigError, ConfigProblem, DataError
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.trainer.chat_settings import template_settings
from megatron_tlt.trainer.environments import turn_tokens

_MOST_ENCODED = 4096  # records of a file: seconds of the tokenizer


def open_tokenizer(config: TrainingConfig) -> HFTokenizer:
    """The tokenizer of the model, or the one named beside it. Raises CheckpointError.

    Where the model is not on this machine, no token is beyond its embedding.
    """
    rows = None if (model := _model(config)) is None else model.vocab_size
    return read_tokenizer(_source(config)[1], rows, template_settings(config))


def tokenizer_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """A tokenizer on this machine that cannot be read or is not the model's."""
    field, source = _source(config)
    if not source.is_dir():
        return []
    if not has_tokenizer(source):
        allowed = "has no tokenizer files (tokenizer.json or its older kinds); model.tokenizer may name a directory"
        return [ConfigProblem(field, str(source), allowed)]
    model, chat = _model(config), config.chat.chat_template
    try:
        tokenizer = open_tokenizer(config)
        if model is not None:
            end_tokens(config.model.path, tokenizer)
    except CheckpointError as error:
        return [ConfigProblem(field, str(source), str(error))]
    return [] if model is None else embedding_problems(field, tokenizer, model.vocab_size, chat=chat)


def tokenizer_here(config: TrainingConfig) -> HFTokenizer | None:
    """The tokenizer; None where it is not on this machine or cannot be read."""
    try:
        return open_tokenizer(config) if has_tokenizer(_source(config)[1]) else None
    except CheckpointError:
        return None


def embedding_problems(field: str, tokenizer: HFTokenizer, rows: int, *, chat: bool) -> list[ConfigProblem]:
    """A tokenizer of another model, or one with special tokens beyond the embedding's rows. `chat`: with a chat
    template that is used.
    """
    beyond = tokenizer.tokens_beyond
    if own := [token for token in beyond if token not in tokenizer.added_tokens]:
        first = f"the first is {own[0]!r} with id {tokenizer.vocabulary()[own[0]]}"
        where = f"the model's embedding, which has {rows}"
        texts = [f"is the tokenizer of another model: {len(own)} of its tokens have no row in {where}; {first}"]
    else:
        there = f"but the model's embedding has {rows} rows"
        roles = tokenizer.special_roles.items()
        texts = [f"its {role} has id {number}, {there}" for number, role in roles if number >= rows]
    if not texts and beyond and chat:
        texts = _template_problems(tokenizer)
    return [ConfigProblem(field, tokenizer.name, text) for text in texts]


def _template_problems(tokenizer: HFTokenizer) -> list[str]:
    """Tokens of the chat template itself that have no row."""
    try:
        text = tokenizer.render_closed([{"role": "user", "content": PROMPT}, {"role": "assistant", "content": TURN}])
    except (CheckpointError, DataError):  # no template, or one for other conversations
        return []
    try:
        tokenizer.encode(text)
    except DataError as error:
        return [f"its chat template writes a token that the model lacks: {error}"]
    return []


def record_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """Records on this machine with tokens that the model lacks. Encodes all of them if there are such tokens."""
    tokenizer, problems = tokenizer_here(config), list[ConfigProblem]()
    if config.records is None or tokenizer is None or not tokenizer.tokens_beyond:
        return []
    for field, path, split in config.records.files:
        try:
            if Path(path).exists():
                deque(encoded_records(config.records, Path(path), split, tokenizer, config.model.max_context), maxlen=0)
        except (CheckpointError, DataError) as error:
            problems.append(ConfigProblem(field, path, str(error)))
    return problems


def long_records(config: TrainingConfig) -> tuple[list[ConfigProblem], list[str]]:
    """For `check`, of the first records in each file on this machine: one that cannot be encoded, and a file of
    fewer records in which none fits into `model.max_context`; a warning for each file of which some are left out.

    A start encodes all of them and says the same.
    """
    tokenizer, problems, warnings = tokenizer_here(config), list[ConfigProblem](), list[str]()
    if config.records is None or tokenizer is None:
        return [], []
    for field, path, split in config.records.files:
        try:
            if Path(path).exists():
                limits = config.model.max_context, _MOST_ENCODED
                _, long = read_sequences(config.records, Path(path), split, tokenizer, *limits)
                warnings += [] if long is None else [f"{field} = {long}"]
        except (CheckpointError, DataError) as error:
            problems.append(ConfigProblem(field, path, str(error)))
    return problems, warnings


def turn_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """A chat template on this machine that does not fit the configuration's environment. Imports the environment."""
    tokenizer, rl = tokenizer_here(config), config.rl
    if rl is None or rl.env is None or tokenizer is None or _model(config) is None:  # it may name other stop tokens
        return []
    try:
        ends = end_tokens(config.model.path, tokenizer, rl.rollout.stop)
        turn_tokens(rl.env, tokenizer, environment_tools(rl.env), chat=config.chat.chat_template, ends=ends)
    except ConfigError as error:
        return error.problems
    return []


def tokenizer_warnings(config: TrainingConfig) -> list[str]:
    """Warnings about the tokenizer of a configuration without problems; none where model or tokenizer is not here."""
    tokenizer, model = tokenizer_here(config), _model(config)
    if model is None or tokenizer is None:
        return []
    stop, setting = ((), None) if config.rl is None else (config.rl.rollout.stop, "rollout.stop")
    ends = end_tokens(config.model.path, tokenizer, stop)
    return warnings_of(tokenizer, model.vocab_size, ends, config.chat.chat_template, stop, setting)


def warnings_of(
    tokenizer: HFTokenizer, rows: int, ends: Sequence[int], chat: bool, stop: Sequence[str], setting: str | None
) -> list[str]:
    """Tokens without one of the embedding's `rows`, and (`chat`) a chat template that ends turns without a stop token.

    `ends`: tokens that end a response; `stop`: strings that do; `setting`: the name of their setting.
    """
    found = []
    if beyond := tokenizer.tokens_beyond:
        first = f"the first is {beyond[0]!r} with id {tokenizer.vocabulary()[beyond[0]]}"
        where = f"no row in the model's embedding, which has {rows}"
        found.append(
            f"{len(beyond)} added tokens of {tokenizer.name} have {where} ({first}): a text with one of them is refused"
        )
    if chat and (text := _end_warning(tokenizer, ends, stop, setting)) is not None:
        found.append(text)
    return found


def _end_warning(tokenizer: HFTokenizer, stops: Sequence[int], stop: Sequence[str], setting: str | None) -> str | None:
    """A template that ends turns with another token than a stop token, or with a text."""
    form = read_turn_form(tokenizer)
    end = form.end[-1]
    if any(text in form.tail for text in stop) or (form.is_of_template and end in stops):
        return None
    if form.is_of_template:
        name = tokenizer.token(end)
        help_ = f"add {end} to eos_token_id in {Path(tokenizer.name) / 'generation_config.json'}"
    elif setting is not None and form.tail.strip():
        name, help_ = form.tail.strip(), f"name it in {setting}"
    else:
        return None
    those = ", ".join(repr(tokenizer.token(number)) for number in stops)
    return (
        f"the chat template of {tokenizer.name} ends a turn of the assistant with {name!r}, which is no stop token "
        f"({those}): a response runs on to the longest length allowed. To end it there, {help_}"
    )


def _source(config: TrainingConfig) -> tuple[str, Path]:
    """The tokenizer's field and directory."""
    return "model.tokenizer" if config.model.tokenizer else "model.path", Path(config.model.tokenizer_path)


def _model(config: TrainingConfig) -> ModelConfig | None:
    """The model's description; None where it is not on this machine or cannot be read."""
    try:
        return ModelConfig.from_hf(config.model.path)
    except (CheckpointError, ConfigError):
        return None

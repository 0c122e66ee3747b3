"""The environments of a run: its worker pool, the tokens of its observations, what it adds to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.dims import is_first_of_engine, rollout_replica
from megatron_tlt.data.prompts import NO_ENV, EnvPrompts
from megatron_tlt.data.tokenizer import end_tokens
from megatron_tlt.data.turns import TurnTokens
from megatron_tlt.distributed.processors import engine_cpus
from megatron_tlt.envs.build import environment_tools, gives_rewards, has_opening
from megatron_tlt.envs.pool import EnvironmentPool
from megatron_tlt.errors import ConfigError, ConfigProblem, EnvError, OpeningError
from megatron_tlt.trainer.turn_metrics import turn_rows

if TYPE_CHECKING:
    from megatron_tlt.config.env import EnvSection
    from megatron_tlt.config.root import Config
    from megatron_tlt.data.tokenizer import HFTokenizer
    from megatron_tlt.distributed.together import Ranks
    from megatron_tlt.envs.base import ToolSchema
    from megatron_tlt.interfaces import TurnSource
    from megatron_tlt.observe.jsonl import JsonRow
    from megatron_tlt.types import Prompt, Sample


def open_environments(config: Config, tokenizer: HFTokenizer, world: Ranks) -> Environments | None:
    """This rank's environments; None for single-turn rollouts. Raises ConfigError, CheckpointError."""
    if config.env is None:
        return None
    data, stop = config.data, config.rollout.stop
    return Environments(
        config.env,
        tokenizer,
        world,
        chat=data.chat_template,
        ends=end_tokens(config.model.path, tokenizer, stop),
        stop=stop,
        # A prompt with more tokens is dropped or refused, unless it is cut at its beginning.
        max_prompt_tokens=None if data.long_prompts == "cut_left" else data.max_prompt_tokens,
        tp=config.rollout.tp,
    )


@contextmanager
def open_turns(environments: Environments | None) -> Iterator[TurnSource | None]:
    """The environments of one rollout, which end with it."""
    if environments is None:
        yield None
        return
    trajectories = environments.trajectories()
    try:
        yield trajectories
    finally:
        trajectories.close()


@contextmanager
def before_a_run(section: EnvSection | None) -> Iterator[None]:
    """Reads prompts before anything is written: raises ConfigError where `reset` gives no opening, not EnvError."""
    try:
        yield
    except EnvError as error:
        assert section is not None, "only an environment raises it"
        raise ConfigError.of(*section.named_by, f"fails: {error}") from error


def prompts_of(environments: Environments | None) -> EnvPrompts:
    """What the environments add to prompts."""
    return NO_ENV if environments is None else environments.prompts


def prompt_tools(config: Config) -> list[ToolSchema]:
    """The tools that the chat template shows with a prompt. Imports the environment; none where that fails, which
    `environment_problems` says.
    """
    section = config.env
    try:
        return environment_tools(section) if section is not None and section.is_named else []
    except EnvError:
        return []


def reward_problems(config: Config) -> list[ConfigProblem]:
    """Reward functions `env` of an environment whose turns have no rewards. Raises EnvError."""
    if config.env is None or gives_rewards(config.env):
        return []
    field, value = config.env.named_by
    allowed = f"would be 0 for every response: {field} = {value!r} is a class of tools without score(response)"
    found = [i for i, function in enumerate(config.rewards.functions) if function.name == "env"]
    return [ConfigProblem(f"rewards.functions.{i}.name", "env", allowed) for i in found]


def reward_warning(config: Config) -> str | None:
    """Of rewards of an environment that no reward function reads; a user's own may judge as the environment does."""
    names = {function.name for function in config.rewards.functions}
    if config.env is None or not names or names & {"env", "python"} or not gives_rewards(config.env):
        return None
    field, value = config.env.named_by
    counted = ", ".join(sorted(names))
    return f"{field} = {value}: rewards of its turns do not count, only {counted}: no reward function is named env"


def turn_tokens(
    section: EnvSection, tokenizer: HFTokenizer, tools: Sequence[dict[str, Any]], *, chat: bool, ends: Sequence[int]
) -> TurnTokens:
    """The tokens of observations. `ends`: those that end a turn.

    Raises ConfigError for a chat template that does not fit.
    """
    return TurnTokens(
        tokenizer,
        chat=chat,
        max_observation_tokens=section.max_observation_tokens,
        tools=tools,
        roles=(section.tool_role,) if tools else ("user",),
        keep_history=section.rewritten_history == "keep",
        ends=ends,
    )


class Environments:
    """One rank's environments. Close them."""

    def __init__(
        self,
        section: EnvSection,
        tokenizer: HFTokenizer,
        world: Ranks,
        *,
        chat: bool,
        ends: Sequence[int],
        stop: Sequence[str],
        max_prompt_tokens: int | None = None,
        tp: int = 1,
    ):
        """Starts the workers, which import meanwhile: of the `tp` ranks of an engine the first one has those of all,
        and their CPUs, for the others' environments are not asked. Collective. Raises ConfigError for a chat template
        that does not fit.

        `ends`: the tokens that end a turn; `stop`: strings that do. `max_prompt_tokens`: a prompt with more tokens is
        not used, so no more of an opening is read.
        """
        tools = environment_tools(section)
        self._decode, self._stop = tokenizer.decode, stop
        self._tokens = turn_tokens(section, tokenizer, tools, chat=chat, ends=ends)
        self._in_thought = self._tokens.opens_thought
        longest = None if max_prompt_tokens is None else self._tokens.characters_of(max_prompt_tokens + 1)
        self._world, self._tp = world, tp
        section = section.model_copy(update={"workers": section.workers * tp})
        self._pool = EnvironmentPool(
            section,
            world.heartbeat,
            in_thought=self._in_thought,
            longest_opening=longest,
            cpus=engine_cpus(world, tp),
        )
        if is_first_of_engine(world.rank, tp):
            self._pool.warm_up()
        self.prompts = EnvPrompts(tools, self._openings if has_opening(section) else None)

    def trajectories(self) -> TurnSource:
        """The environments of one rollout."""
        return self._pool.trajectories(self._tokens)

    def turn_rows(self, sample: Sample) -> list[JsonRow]:
        """The turns of a finished trajectory, for people: see `turn_rows`."""
        has_tools = bool(self.prompts.tools)
        return turn_rows(sample, self._decode, self._stop, has_tools=has_tools, in_thought=self._in_thought)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()

    def _openings(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """The text that `reset` adds to each prompt; the first rank of every engine resets a part of them.

        Collective. Raises OpeningError.
        """
        rank, count = self._world.rank, self._world.size // self._tp
        replica = rollout_replica(rank, self._tp)
        mine: list[str | None] | str
        try:
            mine = self._pool.openings(prompts[replica::count]) if is_first_of_engine(rank, self._tp) else []
        except EnvError as error:
            mine = str(error)
        self._world.wait_for_all()  # one host may have the slow environments
        texts: list[str | None] = [None] * len(prompts)
        for of_rank, part in enumerate(self._world.all_gather_object(mine)):
            if isinstance(part, str):
                raise OpeningError(part)
            if is_first_of_engine(of_rank, self._tp):
                texts[of_rank // self._tp :: count] = part
        return texts

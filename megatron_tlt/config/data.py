"""Prompts and rewards."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_tlt.config.base import FilePath, OnDisk, OpenMapping, Section


class TaskConfig(Section):
    """One procedural task of `reasoning-gym`."""

    name: str
    """Name in reasoning-gym, for example chain_sum."""
    weight: PositiveFloat = 1.0
    """Share among the tasks."""
    params: OpenMapping = Field(default_factory=dict)
    """Keyword arguments of the task's generator."""


class PromptSourceConfig(Section):
    """Where prompts come from."""

    kind: Literal["tasks", "env", "jsonl", "parquet", "hf"] = "tasks"
    """tasks: procedural (seeded, infinite); env: the environment's own (seeded, infinite); jsonl or parquet: files; hf:
    a data set of the Hugging Face hub by name, a clone of one (files of Parquet, JSON, CSV or TSV), or a directory
    that Dataset.save_to_disk wrote. jsonl: an object a line, or one list of them; text files may be compressed (gzip,
    bzip2, xz, zstd)."""
    path: Annotated[str | None, OnDisk("rows", split="split")] = None
    """File (jsonl, parquet) or directory (hf; of parquet the Parquet files of split train, as with hf). hf: or a name
    on the hub, OWNER/NAME or OWNER/NAME@REVISION."""
    subset: str | None = None
    """hf: subset of the data set (`configs` of its card, else a folder); default: the card's default, or the only
    one."""
    split: str | None = None
    """hf: split of the data set; default: train. Without `configs` in its card, shards name it
    (data/SPLIT-00000-of-00001.parquet), else a word in names of files (train, test, validation)."""
    prompt_field: str = "prompt"
    """Column of the prompt: a string, or chat messages (a list of {role, content}), of which a last one of the
    assistant is left out. A.B: field B of column A."""
    answer_field: str | None = "answer"
    """Column of the reference answer: a string, a number, true or false, or a list of acceptable ones. A.B: field B of
    column A. null: rows have no answer; a reward function finds a column of any form in metadata."""
    answer_pattern: str | None = None
    """Regular expression that finds the reference answer in its column, for example after "####": the group that took
    part in the last match. A row without a match is an error."""
    tasks: tuple[TaskConfig, ...] = ()
    """Procedural tasks to mix. An item that its generator cannot draw is dropped, as a prompt that is too long is."""
    seed: NonNegativeInt = 0
    """Seed of the tasks or of the environment, or of the shuffling of a finite source."""
    shuffle: bool = True
    """Shuffle a finite source anew each epoch."""

    @property
    def is_here(self) -> bool:
        """Whether it has a file or directory, and that is on this machine."""
        return self.path is not None and Path(self.path).exists()


UNREAD = PromptSourceConfig()  # this object stands for a source that a command does not read


class DataSection(Section):
    """Training and held-out prompts."""

    train: PromptSourceConfig = PromptSourceConfig()
    """Training prompts."""
    eval: PromptSourceConfig | None = None
    """Held-out prompts; none: no evaluation."""
    chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template if it has one."""
    chat_template_kwargs: OpenMapping = Field(default_factory=dict)
    """Variables of the chat template, for example {enable_thinking: false}, or reasoning_effort, date_string: whatever
    it reads."""
    chat_template_date: date | None = None
    """Date, YYYY-MM-DD, for chat templates that show today's. Default: the day on which the run began.
    Its config.json records the day, and the run keeps it when it goes on, as does `eval` with its train.run_dir."""
    system_prompt: str | None = None
    """System message of the chat template, for prompts without one of their own."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are dropped, or what `long_prompts` says."""
    long_prompts: Literal["drop", "error", "cut_left"] = "drop"
    """Prompts longer than max_prompt_tokens: left out, counted at the start and in the log; an error; or cut at their
    beginning, to their last max_prompt_tokens tokens, the chat template's included."""

    @property
    def sources(self) -> list[tuple[str, PromptSourceConfig]]:
        """The sources that are read, by the name of their section."""
        named = ("data.train", self.train), ("data.eval", self.eval)
        return [(name, source) for name, source in named if source is not None and source is not UNREAD]


class RewardConfig(Section):
    """One reward function."""

    name: Literal["task", "math", "exact", "format", "python", "env"]
    """task: the procedural task's own verifier; math: math-verify; exact: string match; format: a regular
    expression; python: a user's function; env: the environment's rewards. All but env judge the last turn's text."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    pattern: str | None = None
    """Regular expression: group 1 is the answer (task, math, exact), which begins behind the last `<name>` where it
    stands between `<name>` and `</name>`; the whole text must match (format)."""
    path: Annotated[str | None, FilePath()] = None
    """python: `package.module:function` or `path/to/file.py:function`, called as f(prompt, answer, response,
    metadata); answer is a list where a row has several acceptable ones, None where it has none."""
    params: OpenMapping = Field(default_factory=dict)
    """python: extra keyword arguments of the function."""
    turns: Literal["sum", "last"] = "sum"
    """env: the sum of the turns' rewards, or that of the last turn."""
    threshold: float | Literal["auto"] | None = "auto"
    """A response is correct, in accuracy and pass@k, if every function whose threshold is not null reaches it; null:
    the value counts in the reward only. auto: 1; of python and env, whose values have a scale of their own, the report
    then calls no response wrong."""

    @property
    def least(self) -> float | None:
        """`threshold` with its default as a number."""
        return 1.0 if self.threshold == "auto" else self.threshold

    @property
    def needs_answer(self) -> bool:
        """Whether it compares with the reference answer of the prompt."""
        return self.name in ("math", "exact")


def is_of_unknown_scale(name: object, threshold: object) -> bool:
    return threshold == "auto" and name in ("python", "env")


class RewardSection(Section):
    """The sum of reward functions, run in a pool of processes with a timeout."""

    functions: tuple[RewardConfig, ...] = (RewardConfig(name="task"),)
    """Reward functions; their weighted values are added. None, `[]`, with `algorithm.name: distill` only."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for one response, all functions together. One that takes longer is a recorded failure."""
    failure_value: float = 0.0
    """Reward of a response of which one function failed, in place of the whole sum: one above the mean of its group is
    reinforced. Where all rewards of a rollout fail, the run ends."""
    worker_memory_mib: PositiveInt = 8192
    """Memory of one worker process; a function that needs more fails on that sample, which is recorded. A worker is
    replaced where half of what the loaded code has left of it stays taken then."""
    workers: PositiveInt = 1
    """Worker processes per rank. Each judges one response at a time: a reward that waits for a service needs as many as
    requests of a rank may be open at once (examples/own_judge). The first rank of an engine of several (`rollout.tp`)
    judges, with those and the CPUs of all."""

    @property
    def is_of_unknown_scale(self) -> bool:
        """Whether a value below the threshold of one of them may be a right answer's."""
        return any(is_of_unknown_scale(function.name, function.threshold) for function in self.functions)

    @property
    def needs_answers(self) -> bool:
        """Whether one of them compares with the reference answer."""
        return any(function.needs_answer for function in self.functions)

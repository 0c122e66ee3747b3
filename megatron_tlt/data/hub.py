"""Names on the Hugging Face hub: the one module in which a name becomes a directory of this machine.

`Qwen/Qwen2.5-7B`, or `Qwen/Qwen2.5-7B@REVISION` (branch, tag or commit), stands where a configuration or a command
takes a path; a path that exists is never read as a name. Everything behind this module sees directories.

    rank 0             name -> commit (or the commit that a run's config.json records)    broadcast
    first rank a node  commit -> files in the cache of huggingface_hub                    others wait, without a timeout
    every rank         the configuration with directories in place of names

huggingface_hub reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and proxies. Where nodes share a
cache, its file locks let one of them write a file.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_tlt.config.base import Content, places
from megatron_tlt.config.paths import has_form_of_name
from megatron_tlt.config.root import TrainingConfig
from megatron_tlt.data import hub_answers
from megatron_tlt.data.dataset_files import CARD, choose_files
from megatron_tlt.errors import ConfigError, ConfigProblem, DataError, nearest_name, printable

if TYPE_CHECKING:
    from megatron_tlt.distributed.together import Ranks

RootT = TypeVar("RootT", bound=TrainingConfig)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"(?:model|dataset)s--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})$")  # of huggingface_hub's cache
# Of a model or drafter: its description and tokenizer, but for "companions" its weights. Folders but
# additional_chat_templates hold the same weights in other forms.
_COMPANIONS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_WEIGHTS = {"companions": (), "model": ("*.safetensors",), "drafter": ("*.safetensors", "mask_embedding.pt")}
_OTHER_FORMS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*")


@dataclass(frozen=True)
class Named:
    """A field or argument whose value is a name on the hub."""

    field: str
    value: str
    content: Content
    subset: str | None = None
    split: str | None = None

    @property
    def name(self) -> str:
        """OWNER/NAME."""
        return self.value.partition("@")[0]

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit; None: the default branch."""
        return self.value.partition("@")[2] or None

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.field} = {self.value}"

    @property
    def repository(self) -> dict[str, str]:
        """What every function of huggingface_hub takes."""
        return {"repo_id": self.name, "repo_type": "dataset" if self.content == "rows" else "model"}


def is_name(value: str | Path | None) -> bool:
    """Whether a value is read as a name on the hub: OWNER/NAME or OWNER/NAME@REVISION, and no path or data file."""
    return value is not None and has_form_of_name(str(value)) and not os.path.lexists(value)


def names_of(config: TrainingConfig, weights: bool = True) -> list[Named]:
    """The fields of a configuration that name something on the hub. `weights`: whether the command reads them; a base
    under adapters is read by all.
    """
    reads_base = (weights or config.actor.lora is not None) and config.reads_weights
    found = []
    for place in places(config):
        section, content = place.section, place.mark.content
        if place.field == "model.path":
            content = "model" if reads_base else "companions"
        elif not weights and content != "companions":
            continue
        if content is not None and getattr(section, "kind", "hf") == "hf" and is_name(place.value):
            subset, split = (getattr(section, name, None) for name in ("subset", place.mark.split))
            found.append(Named(place.field, place.value, content, subset, split))
    return found


def on_this_machine(
    config: RootT,
    ranks: Ranks,
    weights: bool = True,
    state_dir: Path | None = None,
    as_named: bool = False,
    reads: RootT | None = None,
) -> RootT:
    """The configuration with a directory in place of every name; fetches what the cache lacks. Collective.

    A run that goes on uses the commits that the config.json in its `state_dir` records (default: the run's, or that of
    the run whose checkpoint it begins from). `as_named`: only those of rows, because the models that are named are to
    be measured. Without `weights` only descriptions and tokenizers of models are fetched. `reads`: the part of the
    configuration that the command reads; other names stay. Raises ConfigError, on every rank, with a line for each name
    that cannot be had.
    """
    names = names_of(config if reads is None else reads, weights)
    directories = fetch(names, ranks, _recorded(config, state_dir, as_named))
    return _with_values(config, {field: str(directory) for field, directory in directories.items()})


def fetch_argument(
    field: str, value: Path, ranks: Ranks, content: Content = "model", recorded: str | None = None
) -> Path:
    """The directory that an argument of a command gives by path or by name. Collective. See `fetch`.

    `recorded`: OWNER/NAME@COMMIT of the first start of what goes on, on rank 0.
    """
    named = Named(field, str(value), content)
    return fetch([named], ranks, {field: recorded} if recorded else None)[field] if is_name(value) else value


def fetch(names: Sequence[Named], ranks: Ranks, recorded: dict[str, str] | None = None) -> dict[str, Path]:
    """The directory on this node of every name, by field: the same commit on every rank. Collective.

    `recorded`: OWNER/NAME@COMMIT by field; a field's name takes its commit, if it has none. Raises ConfigError on every
    rank.
    """
    if not names:
        return {}
    commits, problems = ranks.broadcast_object(_commits(names, recorded or {}) if ranks.is_main else None)
    if problems:
        raise ConfigError(problems)
    hosts = ranks.all_gather_object(socket.gethostname())
    leader = hosts.index(hosts[ranks.rank])
    result = _download_all(names, commits) if leader == ranks.rank else ({}, [])
    ranks.wait_for_all()  # a download may take longer than a collective may
    results = ranks.all_gather_object(result)
    if problems := [problem for _, found in results for problem in found]:
        raise ConfigError(problems)
    return {field: Path(directory) for field, directory in results[leader][0].items()}


def cached(config: RootT) -> tuple[RootT, dict[str, str], list[str], list[ConfigProblem]]:
    """For `check`: downloads only cards of data sets and config.json of models, and works without a network.

    Returns the configuration with a directory for every name whose files are all in the cache; of each other model the
    directory of its config.json, by field; a line for each of the others; and a problem for each name that the hub
    refuses, or that is all there is of the model.
    """
    lines: list[str] = []
    problems: list[ConfigProblem] = []
    directories: dict[str, str] = {}
    described: dict[str, str] = {}
    recorded = _recorded(config, None)
    for named in names_of(config):
        unknown: list[ConfigProblem] = []
        with _explained(named, problems, unknown):
            commit = _commit(named, recorded)
            directory = _cached(named, commit, _files(named, commit))
            if directory is None:
                lines.append(f"to be fetched from {endpoint()}: {named.text} (commit {commit[:12]})")
                if named.content != "rows" and (folder := _cached(named, commit, ["config.json"])) is not None:
                    described[named.field] = folder
            else:
                directories[named.field] = directory
        if unknown and named.field == "model.path" and config.model.architecture is None:
            problems += unknown  # nothing says what is planned
        elif unknown:
            lines.append(f"to be fetched from {endpoint()}: {named.text} ({unknown[0].allowed})")
    return _with_values(config, directories), described, lines, problems


def with_names(config: RootT) -> RootT:
    """The inverse of `on_this_machine`, with commits: OWNER/NAME@COMMIT for every directory in a hub's cache."""
    found = {place.field: hub_name(place.value) for place in places(config) if place.mark.content}
    return _with_values(config, {field: "@".join(named) for field, named in found.items() if named is not None})


def hub_name(directory: str) -> tuple[str, str] | None:
    """OWNER/NAME and commit of a directory in a hub's cache; None for any other."""
    found = _SNAPSHOT.search(directory)
    return (f"{found[1]}/{found[2]}", found[3]) if found is not None else None


def _recorded(config: TrainingConfig, state_dir: Path | None, as_named: bool = False) -> dict[str, str]:
    """OWNER/NAME@COMMIT by field, as the run's config.json has them; none where no run goes on.

    `as_named`: see `on_this_machine`.
    """
    kind, recorded_in = type(config), config.recorded_in
    for directory in [state_dir] if recorded_in and state_dir else recorded_in:
        try:
            record = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            before = kind.model_validate({name: record[name] for name in record.keys() & kind.model_fields.keys()})
        except (OSError, ValueError, AttributeError):  # no run yet, one of another version, or no object
            continue
        commits = [named for named in names_of(before) if _COMMIT.fullmatch(named.revision or "")]
        found = [named for named in commits if named.content == "rows" or not as_named]
        # Also by the repository, for a field that the run did not have: its rows belong to those of the others.
        return {str(named.repository): named.value for named in found} | {named.field: named.value for named in found}
    return {}


def _commits(names: Sequence[Named], recorded: dict[str, str]) -> tuple[dict[str, str], list[ConfigProblem]]:
    """The commit of every name, by field, and why there is none."""
    commits: dict[str, str] = {}
    problems: list[ConfigProblem] = []
    for named in names:
        with _explained(named, problems):
            commits[named.field] = _commit(named, recorded)
    return commits, problems


def _commit(named: Named, recorded: dict[str, str]) -> str:
    """The recorded commit of a name without one, else what the hub says, or the cache where the hub is silent."""
    of_others = "" if named.revision else recorded.get(str(named.repository), "")
    name, _, commit = recorded.get(named.field, of_others).partition("@")
    if name == named.name and not _COMMIT.fullmatch(named.revision or ""):
        _say(f"{named.field} = {named.value}: commit {commit}, as recorded")
        return commit

    def resolve() -> str:
        asked = {**named.repository, "revision": named.revision, "local_files_only": hub_answers.is_silent(endpoint())}
        return str(_api().resolve_revision(**asked).resolved)

    return hub_answers.answer(endpoint(), named.text, resolve, hub_answers.COMMIT_S)


def _download_all(names: Sequence[Named], commits: dict[str, str]) -> tuple[dict[str, str], list[ConfigProblem]]:
    """This node's directories, by field, and why a name has none. Every name is looked at before one is fetched."""
    directories: dict[str, str] = {}
    problems: list[ConfigProblem] = []
    files: dict[Named, list[str]] = {}
    for named in names:
        with _explained(named, problems):
            files[named] = _files(named, commits[named.field])
    for named, patterns in files.items():
        if problems:
            break
        with _explained(named, problems):
            commit = commits[named.field]
            directory = _cached(named, commit, patterns)
            if directory is None:
                _say(f"fetching {named.text} (commit {commit[:12]}) from {endpoint()}")
                directory = _snapshot(named, commit, patterns)
            directories[named.field] = directory
    return directories, problems


def _files(named: Named, commit: str) -> list[str]:
    """Patterns of the needed files. Fetches one small file, with which huggingface_hub lists the repository; of a data
    set the card, which names the files. Raises DataError, or an error of huggingface_hub.
    """

    def first() -> str:
        return _snapshot(named, commit, [CARD if named.content == "rows" else "config.json"])

    folder = Path(hub_answers.answer(endpoint(), named.text, first, hub_answers.FILES_S))
    if named.content == "rows":
        there = _listed(named, commit, folder)
        return [CARD, *choose_files(there, folder / CARD, named.subset, named.split, named.value)]
    patterns = [*_COMPANIONS, *_WEIGHTS[named.content]]
    if named.content == "drafter":
        there = _listed(named, commit, folder)
        if not any(name.endswith(".safetensors") and "/" not in name for name in there):
            patterns.append("pytorch_model.bin")
    return patterns


def _listed(named: Named, commit: str, folder: Path) -> list[str]:
    """The paths of all files of a repository, of which `folder` holds some."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [entry.path for entry in get_cached_repo_tree(**named.repository, revision=commit)]
    except CachedRepoTreeNotFoundError:  # a cache that another version filled
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _cached(named: Named, commit: str, files: list[str]) -> str | None:
    """The directory of a name whose files are all in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(named, commit, files, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def _snapshot(named: Named, commit: str, files: list[str], local_files_only: bool = False) -> str:
    """The directory of a name, with files that match the patterns `files`; fetches what the cache lacks."""
    ignored = None if named.content == "rows" else [*_OTHER_FORMS]
    only = {"allow_patterns": files, "ignore_patterns": ignored}
    is_local = local_files_only or hub_answers.is_silent(endpoint())
    return str(_api().snapshot_download(**named.repository, revision=commit, local_files_only=is_local, **only))


@contextmanager
def _explained(
    named: Named, problems: list[ConfigProblem], unreachable: list[ConfigProblem] | None = None
) -> Iterator[None]:
    """Appends an error of the hub, the network or the disk to `problems`, as a problem of this name.

    `unreachable`: takes those that say nothing about the name, because the hub could not be asked.
    """
    from huggingface_hub.errors import HTTPError, RevisionResolutionError, XetDownloadError

    try:
        yield
    except (HTTPError, OSError, ValueError, RevisionResolutionError, XetDownloadError, DataError) as error:
        problem = ConfigProblem(named.field, named.value, _reason(named, error))
        (problems if unreachable is None or not _is_unreachable(error) else unreachable).append(problem)


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub could not be asked: offline mode, no connection, a server in trouble."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    silent = (errors.HTTPError, errors.RevisionResolutionError, errors.OfflineModeIsEnabled)
    return isinstance(error, (*silent, errors.LocalEntryNotFoundError))


def _reason(named: Named, error: Exception) -> str:
    """One line about an error."""
    from huggingface_hub import constants, errors

    kind, cache, near = named.repository["repo_type"], constants.HF_HUB_CACHE, nearest_name(named.name)
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: accept its terms at {endpoint()}/{named.name}, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "a private one needs HF_TOKEN with a token that may read it"
        return f"is no path from {os.getcwd()}, and {endpoint()} has no {kind} {named.name} ({private}){near}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{endpoint()} has {named.name}, but no revision {named.revision!r} of it"
    if _is_unreachable(error):
        silent = "does not answer" if hub_answers.is_silent(endpoint()) else "is not reachable"
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{endpoint()} {silent}"
        return f"is no path from {os.getcwd()}, and no whole {kind} in the cache {cache}; {why}{near}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be written to {cache}: {error.strerror}"
    return str(error).strip().partition("\n")[0]


def _with_values(section: Any, values: dict[str, str]) -> Any:
    """A copy of a configuration with other values for some fields, by dotted path."""
    for path, value in values.items():
        section = _with_value(section, path.split("."), value)
    return section


def _with_value(section: Any, keys: list[str], value: str) -> Any:
    new = value if len(keys) == 1 else _with_value(getattr(section, keys[0]), keys[1:], value)
    return section.model_copy(update={keys[0]: new})


def _api() -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():  # a bar is thousands of lines in a job's log
        disable_progress_bars()
    return HfApi(library_name="megatron-tlt")


def endpoint() -> str:
    """The hub's address."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def _say(text: str) -> None:
    print(printable(f"megatron-tlt: {text}"), file=sys.stderr, flush=True)

"""Evaluation on held-out prompts: pass@1, pass@k, response lengths.

Every evaluation of a run samples responses to the same prompts with the same noise (common random numbers), so two of
them differ by the policy only. The last one's responses are drafts of the next one (`trainer/pre_rollouts`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megatron_tlt.data.hashing import digest
from megatron_tlt.distributed.exchange import gather_columns
from megatron_tlt.errors import UnjudgedError
from megatron_tlt.trainer.batch_assembly import as_columns, group_samples, share_responses
from megatron_tlt.trainer.environments import open_turns
from megatron_tlt.trainer.pre_rollouts import exchanged
from megatron_tlt.trainer.sampling import judged_of, score, why_unjudged
from megatron_tlt.trainer.turn_metrics import column_means, turn_columns, unanswered
from megatron_tlt.types import GenerateCall

if TYPE_CHECKING:
    from megatron_tlt.config.run import EvalSection
    from megatron_tlt.data.prompt_queue import PromptQueues
    from megatron_tlt.interfaces import RolloutBackend
    from megatron_tlt.observe.progress import ProgressDisplay
    from megatron_tlt.resilience.rollout_cache import RolloutCache
    from megatron_tlt.resilience.shutdown import GracefulShutdown
    from megatron_tlt.rewards.pool import RewardPool
    from megatron_tlt.trainer.environments import Environments
    from megatron_tlt.types import Prompt, Sample, SamplingParams

_log = logging.getLogger(__name__)
_SEED_OFFSET = 0x5EED  # evaluation must not reuse the noise of training rollouts
_COLUMNS = {
    "prompt": np.int64,
    "first": np.int64,
    "correct": np.int64,
    "reward": float,
    "length": float,
    "cut": float,
    "failed": bool,
}


def first_of_each(prompts: Sequence[Prompt]) -> dict[int, int]:
    """By id of every prompt that of the first one with the same tokens and answer: a file may repeat its rows, which
    are one problem with more responses. A prompt without an answer is one of its own, for a column that a reward
    function reads, or its environment's seed, may tell it from others.
    """
    seen: dict[tuple[object, ...], int] = {}
    return {
        p.prompt_id: p.prompt_id if p.answer is None else seen.setdefault((p.token_ids, p.answer), p.prompt_id)
        for p in prompts
    }


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Unbiased estimate of "at least one of k responses is right" from `total` responses (Chen et al. 2021, eq. 1)."""
    if total - correct < k:
        return 1.0
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


@dataclass(frozen=True)
class EvalResult:
    """One evaluation. `pass_at["k"]` is a mean over different prompts (see `first_of_each`), `num_prompts` their
    number, `stderr` the standard error of pass@1, nan of one prompt.

    `failures`: responses that no reward function judged, aborted trajectories included; they count as wrong.
    `env`: with environments the mean of turns, and of the reward of the N-th turn where there was one.
    """

    step: int
    num_prompts: int
    pass_at: dict[str, float]
    stderr: float
    reward: float
    mean_length: float
    p95_length: float
    truncated: float
    failures: int
    env: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Scalars under `eval/`."""
        values = {f"eval/pass@{k}": v for k, v in self.pass_at.items()}
        values |= {f"eval/env/{name}": value for name, value in self.env.items()}
        names = ("stderr", "reward", "mean_length", "p95_length", "truncated", "failures")
        return values | {f"eval/{name}": float(getattr(self, name)) for name in names}


def eval_params(section: EvalSection, params: SamplingParams) -> SamplingParams:
    """Those of an evaluation in a run whose rollouts have `params`."""
    own = {name: getattr(section, name) for name in ("max_tokens", "top_k", "top_p", "min_p")}
    own = {name: value for name, value in own.items() if value is not None}
    return replace(params, temperature=section.temperature, seed=params.seed + _SEED_OFFSET, **own)


class Evaluator:
    """Generates and scores responses to a fixed set of prompts; the rollout replicas fetch them from one queue."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        section: EvalSection,
        params: SamplingParams,
        backend: RolloutBackend,
        rewards: RewardPool,
        queues: PromptQueues,
        environments: Environments | None = None,
        draft_bytes: int = 0,
    ):
        """Keeps responses of at most `draft_bytes`, 4 a token, as drafts of the next evaluation."""
        self._prompts, self._queues = prompts, queues
        self._first = first_of_each(prompts)
        self._environments = environments
        self._section, self._backend, self._rewards, self._world = section, backend, rewards, queues.world
        self.params = eval_params(section, params)
        self._draft_bytes = draft_bytes
        self._drafts: dict[tuple[int, int], np.ndarray] = {}  # see `GenerateCall.drafts`; the same on every rank

    @property
    def fingerprint(self) -> str:
        """Of the prompts and their answers, without what environments write behind a row."""
        rows = ((p.token_ids if p.row_text is None else p.row_text, p.answer) for p in self._prompts)
        return digest(*rows)

    def run(
        self,
        step: int,
        stop: GracefulShutdown | None = None,
        progress: ProgressDisplay | None = None,
        cache: RolloutCache | None = None,
    ) -> EvalResult:
        """Evaluates the engine's present policy; `progress` shows the finished responses of this rank's engine. `cache`
        keeps responses and has those of earlier starts.

        Collective. Raises GracefulExit if `stop` cuts it short, and UnjudgedError where no response was judged.
        """
        num_samples = self._section.samples_per_prompt
        queue = self._queues.open(self._backend.ordered(self._prompts), num_samples)
        dropped = False
        with open_turns(self._environments) as turns:
            call = GenerateCall(queue, self.params, num_samples, self._report, drafts=self._drafts, turns=turns)
            found = {} if cache is None else cache.find(call)
            total = len(self._prompts) * num_samples
            if progress is not None:
                if cache is not None and cache.has_old_steps:
                    progress.note(cache.reuse_line(len(found), total))
                share = -(-(total - len(found)) // self._queues.num_replicas)
                call = progress.watched(call, "eval: responses of this replica", share)
            generate = self._backend.generate if cache is None else partial(cache.generate, found=found)
            if stop is None:
                samples = generate(call)
            else:
                samples, dropped = stop.interruptible(generate, call)
        self._world.wait_for_all()  # there is no idle window, and one replica may have the longest responses
        if stop is not None:
            stop.sync("eval", dropped)
        self._keep(samples)
        groups = group_samples(queue.fetched, samples) if self._queues.is_first else []
        failures = score(self._world, self._rewards, groups)
        share_responses(self._world, self._backend, groups)  # the same prompts come again
        if why := why_unjudged(self._world.all_gather_object(judged_of(groups))):
            raise UnjudgedError(f"evaluation at step {step}: {why}")
        judged = [sample for group in groups for sample in group.samples]
        for warning in filter(None, (failures, unanswered(judged))):
            _log.warning(warning)
        rows = [
            (i, self._first[i], r.correct, r.value, s.num_drawn, s.is_truncated, r.failure is not None)
            for i, g in ((g.prompt.prompt_id, g) for g in groups)
            for s, r in zip(g.samples, g.rewards, strict=True)
        ]
        columns = as_columns(_COLUMNS, rows)
        if self._environments is not None:
            columns |= turn_columns(judged)
        return summarise(step, gather_columns(self._world, columns))

    def _keep(self, samples: Sequence[Sample]) -> None:
        """Keeps all ranks' responses: any replica may fetch a prompt the next time. Collective. Mutates the drafts."""
        self._drafts.clear()  # before the new ones come
        if self._draft_bytes:
            mine = samples if self._queues.is_first else []
            responses, _ = exchanged(self._world, mine, self._draft_bytes)
            self._drafts |= {name: tokens for name, tokens, _ in responses}

    def _report(self, running: int, waiting: int, _: int) -> None:
        self._world.heartbeat(running=running, queued=waiting)


def summarise(step: int, columns: dict[str, np.ndarray]) -> EvalResult:
    """Statistics of one evaluation from one row a sample: prompt, first (of the same ones, see `first_of_each`),
    correct, reward, length, cut, failed; with environments also those of `turn_columns`.

    The rows are brought into the prompts' order first: as they come, it depends on the number of ranks, and the
    last bits of a sum on it.
    """
    order = np.argsort(columns["prompt"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    _, inverse = np.unique(columns["first"], return_inverse=True)
    total, right = np.bincount(inverse), np.bincount(inverse, weights=columns["correct"])
    pairs = [(int(c), int(n)) for c, n in zip(right, total, strict=True)]
    ks = [2**i for i in range(int(total.min()).bit_length())]
    share = right / total
    stderr = float(share.std(ddof=1) / math.sqrt(len(share))) if len(share) > 1 else float("nan")
    return EvalResult(
        step=step,
        num_prompts=len(total),
        pass_at={str(k): float(np.mean([pass_at_k(c, n, k) for c, n in pairs])) for k in ks},
        stderr=stderr,
        reward=float(columns["reward"].mean()),
        mean_length=float(columns["length"].mean()),
        p95_length=float(np.quantile(columns["length"], 0.95)),
        truncated=float(columns["cut"].mean()),
        failures=int(columns["failed"].sum()),
        env=column_means(columns["turns"], columns["turn_rewards"]) if "turns" in columns else {},
    )

"""Where a response and its turns end, in every engine. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_tlt.rollout.request import Prefill, Request
from megatron_tlt.types import FinishReason, TurnResult


def draw_first(prefill: Prefill, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
    """Appends every child's token to its output; returns and removes those that end with it."""
    prefill.sampled = True
    for request, token, logprob in zip(prefill.children, tokens, logprobs, strict=True):
        request.output.append(token)
        request.logprobs.append(logprob)
        if request.stop_strings is not None and request.stop_strings.push(token):
            request.finish_reason = "stop"
        request.finish_reason = finish_reason(request, token, len(request.output))
    finished = [r for r in prefill.children if r.finish_reason is not None]
    prefill.children = [r for r in prefill.children if r.finish_reason is None]
    return finished


def computed_again(prefill: Prefill) -> list[Request]:
    """Removes and returns the request of a `prefill` that had ended while it was parked without its blocks."""
    ended = [request for request in prefill.children if request.finish_reason is not None]
    for request in ended:
        request.blocks = list(prefill.blocks)
        prefill.children.remove(request)
    return ended


def run_length(request: Request, run: Sequence[int]) -> int:
    """Tokens of `run` up to the first that ends the response: those that plain decoding would have drawn."""
    for length, token in enumerate(run, 1):
        if request.stop_strings is not None and request.stop_strings.push(token):
            request.finish_reason = "stop"
            return length
        if token in request.stop_token_ids:
            return length
    return len(run)


def finish_reason(request: Request, token: int, length: int) -> FinishReason | None:
    if request.finish_reason is not None or token in request.stop_token_ids:
        return "stop"
    return cut_reason(request, length) if length >= request.limit else None


def cut_reason(request: Request, length: int) -> FinishReason:
    """Why a request with `length` tokens of response was cut by its limit."""
    return "carry" if request.params.max_call_tokens and length < request.params.max_tokens else "length"


def is_turn_end(request: Request, length: int) -> bool:
    """Whether the turn that has ended, with `length` tokens of response, goes to an environment. A turn that was cut
    by the limit of the whole response does not.
    """
    is_cut = request.finish_reason == "length" and length >= request.params.max_tokens
    return request.takes_turns and not is_cut


def take_result(request: Request, result: TurnResult) -> FinishReason | None:
    """Why a parked request ends with its environment's `result`; None: it goes on. Notes reward, seconds and failure
    in it.
    """
    request.turn_seconds.append(result.seconds)
    if result.failure is not None:
        request.failure = result.failure
        return "abort"
    request.turn_rewards.append(result.reward)
    if result.ended is not None:
        return "cut" if result.ended == "env" and request.turn_is_cut else result.ended
    fits = len(request.output) + len(result.given) < request.params.max_tokens
    return None if fits else "length"

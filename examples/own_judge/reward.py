"""A reward that asks a model behind a service with OpenAI's interface (vLLM, SGLang and others), with retries."""

import json
import os
import re
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

QUESTION = """\
How clear and short is this response to the problem? Do not judge whether its result is right.

<problem>
{prompt}
</problem>
<response>
{response}
</response>

Reply with one sentence and a last line "Score: N", N from 0 to 10."""
SCORE = re.compile(r"Score:\s*(\d+)")
FOR_GOOD = {400, 401, 403, 404, 422}  # HTTP errors that another try does not mend


def reward(
    prompt: str, answer: str | None, response: str, metadata: dict, url: str, model: str, **limits: float
) -> float:
    """The judge's score, 0 to 1. `limits`: those of `ask`, whose errors it raises; ValueError without a score."""
    text = ask(url, model, QUESTION.format(prompt=prompt, response=response), **limits)
    found = SCORE.findall(text)
    if not found:
        raise ValueError(f"the judge gave no score, but {text[-80:]!r}")
    return min(int(found[-1]), 10) / 10


def ask(url: str, model: str, question: str, tries: int = 3, request_s: float = 30.0, wait_s: float = 2.0) -> str:
    """The model's reply. A request takes at most `request_s`; waits between tries double, beginning with `wait_s`."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 128}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
    request = Request(url, json.dumps(body).encode(), headers)
    for left in reversed(range(tries)):
        try:
            with urlopen(request, timeout=request_s) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
        except (OSError, HTTPException) as error:  # HTTP errors, refused and lost connections, a request's timeout
            if not left or (isinstance(error, HTTPError) and error.code in FOR_GOOD):
                raise
        time.sleep(wait_s)
        wait_s *= 2
    raise ValueError(f"tries = {tries}: must be at least 1")

"""Before a run: texts with special tokens, as conversations have them that are rendered already.

Rows of other programs may have `<|im_start|>user..<|im_end|>` in a text, around which the chat template would go again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from megatron_tlt.data.chat import Messages, all_texts
from megatron_tlt.data.tokenizer import HFTokenizer

_MOST_READ = 4096  # rows of a file: less than a second


def rendered_warning(
    prompts: Iterable[tuple[str, str | Messages]], tokenizer: HFTokenizer, source: str, remedy: str
) -> str | None:
    """The line for prompts (place, prompt) of `source` that are put into the chat template; None where no text of one
    has a special token. Reads the first ones.
    """
    read = [*islice(prompts, _MOST_READ)]
    found = [(place, tokenizer.special_token_in(all_texts(prompt))) for place, prompt in read]
    marked = [(place, token) for place, token in found if token is not None]
    if not marked:
        return None
    (place, token), of = marked[0], f"{'the first ' * (len(read) == _MOST_READ)}{len(read)}"
    return (
        f"{source}: {len(marked)} of {of} rows have a special token in their text, as a rendered conversation has "
        f"(first {place}: {token!r}), and the chat template goes around it: {remedy}"
    )

"""Serves exported drafters in a plain vLLM, without anything of ours in it: python vllm_serving.py JOBS.json.

Run by vLLM's own Python. A job is {"model", "drafter", "method", "draft_len", "prompts", "max_tokens"}; prints one JSON
line of each: {"outputs", "accept_length"}, greedy, or {"error"}.
"""

import gc
import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def serve(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        job["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,  # they count accepted drafts
        speculative_config={
            "method": job["method"],
            "model": job["drafter"],
            "num_speculative_tokens": job["draft_len"],
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False)
    counted = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", 0) for m in llm.get_metrics()}
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    length = 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
    return {"outputs": [list(o.outputs[0].token_ids) for o in done], "accept_length": length}


if __name__ == "__main__":
    for given in json.loads(open(sys.argv[1], encoding="utf-8").read()):  # noqa: SIM115
        try:
            result = serve(given)
        except Exception as error:  # noqa: BLE001  # the edge of this process: the test shows it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)

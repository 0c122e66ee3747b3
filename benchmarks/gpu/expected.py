"""What figures of the check are expected to be: estimates by arithmetic, from data sheets (docs/guides/gpu_check.md).

Of Qwen2.5-7B on one H100, as shares of bounds where the figure allows it, so that they hold for other sizes, too; a
decoding step of the default recipe's 0.5B is so short that its launches and Python are most of it. The first run on a
GPU judges them: where it finds another figure, either the program or the estimate is wrong.
"""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {
    "versions": {"copy_of_sheet": "0.85", "matmul_of_sheet": "0.75"},
    "kernels": {
        "attention_of_bandwidth_1x8000": "0.2 to 0.4: two kernels of microseconds",
        "attention_of_bandwidth_32x2000": "0.5 to 0.7",
        "attention_of_bandwidth_128x2000": "0.6 to 0.7",
    },
    "decode": {
        "of_bandwidth_bound_1": "0.63 to 0.66; 0.5B: 0.2 to 0.35",
        "of_bandwidth_bound_128": "0.5 to 0.6; 0.5B: 0.2 to 0.4",
        "host_ms_1": "0.2 to 0.7",
        "host_ms_128": "0.2 to 0.7",
    },
    "speculation": {"speedup_b1": "about 2", "worst_batch": "1"},
    "rl": {"same_responses": "below 1: bf16", "off_over_on": "1"},
    "exact": {"bf16_rows_alike": "1", "fp32_rows_alike": "1", "bf16_same_responses": "1", "fp32_same_responses": "1"},
    "update": {"mfu": "0.36 to 0.42 with Transformer Engine", "lengths_first_over_median": "below 3"},
    "vllm_cycle": {"push_s": "0.7 to 1.5 at 7B", "same_responses": "1"},
    "pairs": {"lora_same": "1", "idle_same": "1"},
    "drafter": {"tokens_per_s": "40000", "te_over_bf16": "above 1"},
    "engines": {
        "embedded_over_vllm_off_1": "0.9",
        "embedded_over_vllm_off_256": "0.75 to 0.8",
        "embedded_over_vllm_on_1": "1",
    },
}


def expected(part: str, figure: str) -> str:
    """The expectation, as it stands behind the figure; nothing without one."""
    text = EXPECTED.get(part, {}).get(figure)
    return "" if text is None else f"   expected: {text}"

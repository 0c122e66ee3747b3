"""Memory of the rollout engine on one rank: weights, KV cache, a step's temporaries, drafters (graphs: `graphs.py`).

Legend: T rows of a forward, R rows whose logits are computed, H hidden, F intermediate, V vocabulary, d head width, K
key-value heads, L layers, t = rollout.tp; e bytes of an element.

* Weights: the embedding whole on every rank, layers over t; in C a packed LM head, whole on every rank; in PyTorch the
  head over t, and a head of its own where it is sharded (t > 1), even if the model ties it.
* KV cache: `2*L*(K/t)*d*e` bytes a token of context (Kwon et al., arXiv 2309.06180, section 2.3); a trained drafter
  adds its one layer with all K heads, and `H*e` for the policy's hidden states, which it reads (of kind eagle3 4 of
  them); every rank holds both.
* On CUDA the KV cache is what remains of the device (`memory.py`); on CPU what all running requests need.
* An engine in a process of its own has the same weights, and vLLM the cache that the plan gives it, without hidden
  states; TensorRT-LLM takes a share of what is free. Their steps count as ours. Of their graphs nothing is known: with
  the CUDA context of the process they are `PROCESS_MIB`, an assumption.
"""

from __future__ import annotations

from megatron_tlt.config.block_drafters import LOGITS_AT_ONCE
from megatron_tlt.config.checks.layout import Device
from megatron_tlt.config.engine_process import EngineProcessSection, VllmSection
from megatron_tlt.config.model import ArchitectureConfig
from megatron_tlt.config.planning.parameters import (
    MIB,
    decoder_parameters,
    drafter_parameters,
    element_bytes,
    expert_parameters,
    kv_bytes_per_token,
)
from megatron_tlt.config.rollout import KV_BLOCK
from megatron_tlt.config.root import Config

LOADED = "experts as they load"  # names of parts
READ = "a response's hidden states"
INPUTS = "inputs of a forward"
PROCESS_MIB = 2048  # of an engine in a process of its own: CUDA context and graphs; assumed, on CPU a quarter
_SPLIT_COLUMNS = 132 * 128  # of invariant products with splits of K: columns times splits at most; a test compares
_SPLIT_HEADS = 32  # of invariant attention: kv heads times splits at least; a test compares
SAMPLED_AT_ONCE = 1 << 23  # logits that `rollout.sampler` draws from at a time in PyTorch
_SAMPLED_BYTES = 56  # of a logit's keyed noise and scores there
# Logits that the plugin in vLLM copies to fp32 at a time: 441 rows of 152k tokens, so that plain decoding is one chunk.
FP32_AT_ONCE = 1 << 26


def most_cache_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """A cache for all running requests of the longest context."""
    return _cache_bytes(config, shape, config.rollout.max_running_requests, config.model.max_context)


def least_cache_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """A cache for one request of full length: with less, the engine could never finish it."""
    return _cache_bytes(config, shape, 1, config.longest_sequence)


def _cache_bytes(config: Config, shape: ArchitectureConfig, requests: int, tokens: int) -> int:
    """Whole blocks: samples of a prompt need a copy of its last block; vLLM holds a block back, and drafts, which lie
    behind a request's last token, may begin one more.
    """
    block, more = (VllmSection.kv_block, 2) if config.rollout.backend == "vllm" else (KV_BLOCK, 1)
    return (requests * -(-tokens // block) + more) * block * kv_bytes_per_token(config, shape)


def engine_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """Weights of one rank of an engine. The native decoder (packed weights) holds the whole LM head on every rank."""
    rollout = config.rollout
    table = shape.vocab_size * shape.hidden_size
    packed = has_packed_head(config, device)
    has_head = packed or rollout.tp > 1 or not shape.tie_word_embeddings
    count = decoder_parameters(shape) // rollout.tp
    count += table + has_head * table // (1 if packed else rollout.tp)
    return count * element_bytes(rollout.dtype)


def has_packed_head(config: Config, device: Device) -> bool:
    """Whether the engine is the native decoder, which packs a whole LM head on every rank."""
    rollout = config.rollout
    return rollout.backend == "embedded" and device == "cpu" and rollout.kernels != "torch"


def hidden_part(config: Config) -> str:
    """The part's name of the room for hidden states in an engine's process: its setting."""
    return f"rollout.{config.rollout.backend}.hidden_mib"


def process_bytes(config: Config, process: EngineProcessSection, shape: ArchitectureConfig) -> dict[str, int]:
    """Bytes of an engine in a process of its own beside weights and cache. A weight sync: in vLLM a layer's experts,
    that came and made ready. All the time: in vLLM the embedded inputs of the largest forward, and with a trained
    drafter its own and the states that it reads. Training a drafter: room for hidden states, where the engine hands
    them out, and the policy's tables on the rank.
    """
    rollout = config.rollout
    loaded = 2 * expert_parameters(shape, shape.num_experts) * element_bytes(rollout.dtype)
    parts = {LOADED: loaded} if process.loads_experts_whole else {}
    if rollout.backend == "vllm":
        kept = 1 if rollout.speculation.trained is None else 3
        parts[INPUTS] = kept * forward_rows(config) * shape.hidden_size * element_bytes(rollout.dtype)
    if not config.idle.train_drafter:
        return parts
    tables = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
    states = {hidden_part(config): getattr(process, "hidden_mib", 0) * MIB}
    return (
        parts
        | (states if config.hidden_states_of == "engine" else {})
        | {
            "embedding and LM head": tables * element_bytes(rollout.dtype),
        }
    )


def drafter_weight_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """The engine's own copy of the trained drafter, whole on every rank; of a reduced vocabulary without an LM head of
    its own with the rows of the policy's, of a block drafter beside the native decoder with the head, unpacked.
    """
    count, tokens = drafter_parameters(config, shape), config.rollout.speculation.drafted_tokens(shape.vocab_size)
    kind = config.rollout.speculation.trained
    is_copied = kind is not None and kind.passes(2) == 1 and has_packed_head(config, device)
    is_copied = is_copied and not shape.tie_word_embeddings
    if kind is not None and not kind.has_own_head and (tokens < shape.vocab_size or is_copied):
        count += tokens * shape.hidden_size
    return count * element_bytes(config.rollout.dtype)


def suffix_bytes(config: Config) -> int:
    """The suffix drafter's tries and as much for earlier responses, once both are full; in the host's memory."""
    section = config.rollout.speculation
    return 2 * section.suffix.history_mib * MIB * (section.drafter == "suffix")


def rollout_step_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """Temporaries of the largest forward, or of drawing tokens, whichever is more.

    Of each of T = `forward_rows` rows the residual stream, its norm and their sum, and the MLP's four products, and
    those of each expert that a row takes, with input and output; the experts' numbers; the outputs of layers that a
    drafter reads. On CPU, of each request its logits, noise and ranks, eight times V in fp32. On CUDA, of each of R
    rows its logits in the engine's type and in fp32; on several ranks those of all ranks, too, and joined; and what
    the sampler takes; or a block drafter's step. vLLM's ranks have all logits, which are drawn from in chunks.
    """
    rollout, element = config.rollout, element_bytes(config.rollout.dtype)
    process = rollout.engine_process
    forward = forward_rows(config) * row_bytes(config, shape)
    if device == "cpu":
        return max(forward, rollout.max_running_requests * shape.vocab_size * 8 * 4)
    logits = verified_rows(config) * shape.vocab_size
    if process is not None and process.gathers_logits:
        gathered = logits * element if rollout.tp == 1 else logits * element * (2 + 1 / rollout.tp)
        copies = min(logits, FP32_AT_ONCE) * 4
        return max(forward, int(gathered) + copies + min(logits, SAMPLED_AT_ONCE) * _SAMPLED_BYTES)
    drawn = int(logits * _logit_bytes(config)) + min(logits, SAMPLED_AT_ONCE) * _SAMPLED_BYTES
    return max(forward, drawn, draft_bytes(config, shape))


def read_bytes(config: Config, shape: ArchitectureConfig, device: Device) -> int:
    """Hidden states of the longest response, gathered at its end and on their way to the host's buffer. On CPU they are
    in the buffer at once.
    """
    is_read = config.idle.train_drafter and config.hidden_states_of == "engine" and config.rollout.backend == "embedded"
    if device == "cpu" or not is_read:
        return 0
    width = config.rollout.speculation.state_parts * shape.hidden_size
    return config.model.max_context * width * element_bytes(config.rollout.dtype)


def _logit_bytes(config: Config) -> float:
    """Of a logit in the engine's type and in fp32, on several ranks gathered."""
    tp, element = config.rollout.tp, element_bytes(config.rollout.dtype)
    return element + 4 if tp == 1 else 8 + (element + 4) / tp


def draft_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """Temporaries of a block drafter's step for as many as all running requests, 0 of other drafters: rows of blocks as
    those of a forward, or the rows' outputs, twice, with the logits that are computed at a time: in both types, or in
    fp32 beside one position's bias.
    """
    rollout, kind = config.rollout, config.rollout.speculation.trained
    if kind is None or kind.rows == 1 or rollout.backend != "embedded":
        return 0
    requests, tokens = rollout.max_running_requests, config.rollout.speculation.drafted_tokens(shape.vocab_size)
    one = requests * tokens  # logits of a position
    some = min(one * kind.rows, max(one, LOGITS_AT_ONCE))
    element, rows = element_bytes(rollout.dtype), requests * kind.rows
    logits = max(int(some * _logit_bytes(config)), 4 * some + one * element)
    return max(rows * row_bytes(config, shape), 2 * rows * shape.hidden_size * element + logits)


def row_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """A forward's temporaries that each of its rows has: see `rollout_step_bytes`."""
    tp, chosen = config.rollout.tp, shape.num_experts_per_tok
    row = (2 + config.rollout.speculation.state_parts) * shape.hidden_size + 4 * shape.intermediate_size // tp
    row += chosen * (2 * shape.hidden_size + 4 * shape.moe_intermediate_size // tp)
    routed_experts = 2 * 8 * chosen * len(shape.moe_layers)  # int64, of each layer, then joined
    return row * element_bytes(config.rollout.dtype) + routed_experts + _split_bytes(config, shape)


def _split_bytes(config: Config, shape: ArchitectureConfig) -> int:
    """A row's float32 sums of splits with invariant numerics: of a product or of attention, whichever is more."""
    rollout = config.rollout
    if (rollout.backend, rollout.numerics, rollout.kernels) != ("embedded", "invariant", "auto"):
        return 0
    kv_heads, heads = max(1, shape.num_kv_heads // rollout.tp), shape.num_heads // rollout.tp
    attention = max(1, _SPLIT_HEADS // kv_heads) * heads * (shape.head_dim + 2)
    return 4 * max(attention, _SPLIT_COLUMNS)


def forward_rows(config: Config) -> int:
    """T: rows of the engine's largest forward. That of vLLM, at its start, has the rows of a block drafter, too."""
    rollout, kind = config.rollout, config.rollout.speculation.trained
    blocks = 0 if rollout.backend != "vllm" or kind is None or kind.rows == 1 else kind.rows
    return rollout.max_batched_tokens + rollout.max_running_requests * blocks


def verified_rows(config: Config) -> int:
    """R: rows of the largest forward whose logits are all computed."""
    rollout = config.rollout
    rows = rollout.max_running_requests * rollout.speculation.rows_each
    if config.idle.pre_rollout is not False:
        rows = max(rows, rollout.verify_rows)
    return min(rows, rollout.max_batched_tokens)

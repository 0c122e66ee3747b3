"""The running requests as arrays: a step costs a few vector operations whatever their number. Torch-free.

Row `r < num_rows` is one running request; rows are dense (the last one moves into a hole), so that the
model's inputs are plain views. A *slot* holds a request's output and stays the same while the request runs.

Legend: N most running requests, T most tokens of a step, W output width, K blocks of the longest context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_tlt.rollout.request import Request


class RunningRows:
    """Structure of arrays: all that a pure decoding step reads or writes, preallocated."""

    def __init__(self, max_rows: int, max_step_tokens: int, max_blocks: int, vocab_size: int, max_output: int):
        width = max(max_rows, max_step_tokens)
        # One array, so that a step advances all four by a single addition.
        self.counters = np.zeros((4, width), np.int32)
        self.positions: np.ndarray = self.counters[0]  # [T] of the token to feed
        self.context_lens: np.ndarray = self.counters[1]  # [N] cached tokens after the forward
        self.slot_mapping: np.ndarray = self.counters[2]  # [T] block * block_size + offset
        self.output_len: np.ndarray = self.counters[3]  # [N] tokens so far, given ones too = position of the next one
        self.token_ids = np.zeros(width, np.int32)  # [T] to feed
        self.block_tables = np.zeros((max_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.write_at = np.zeros(max_rows, np.int64)  # flat index of the next output element
        self.limit = np.zeros(max_rows, np.int32)  # tokens at which the response or its present turn ends
        self.slots = np.zeros(max_rows, np.int32)  # of the row's request
        self.keys = np.zeros(max_rows, np.uint64)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float64)  # exact: it is compared as 1 - p
        self.min_p = np.zeros(max_rows, np.float32)
        self.requests: list[Request] = []
        self.num_masked = 0
        self.num_with_stops = 0  # rows with stop strings
        self.is_stop = np.zeros(vocab_size, bool)  # tokens that end some request; the request itself decides
        inputs = (self.token_ids, self.num_blocks, self.write_at, self.limit, self.slots, self.keys)
        params = (self.temperature, self.top_k, self.top_p, self.min_p)
        self._row_arrays: tuple[np.ndarray, ...] = (*inputs, *params)
        self._free_slots = list(range(max_rows - 1, -1, -1))
        self.outputs = np.zeros((max_rows, max_output), np.int32)  # [N, W]; rows that are never used take no memory
        self.logprobs = np.zeros((max_rows, max_output), np.float32)
        self._flat_outputs, self._flat_logprobs = self.outputs.reshape(-1), self.logprobs.reshape(-1)

    @property
    def num_rows(self) -> int:
        """Running requests."""
        return len(self.requests)

    def start(self, request: Request, blocks: Sequence[int], cached: int, slot_mapping: int) -> None:
        """Gives `request` the next row; `cached` tokens are in `blocks`, its last output is fed next."""
        row = len(self.requests)
        params = request.params
        assert request.row < 0
        request.row, request.slot = row, self._free_slots.pop()
        self.requests.append(request)
        self.slots[row] = request.slot
        length = len(request.output)
        self.counters[:, row] = cached, cached + 1, slot_mapping, length
        self.token_ids[row] = request.output[-1]
        self.block_tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.outputs[request.slot, :length] = request.output
        self.logprobs[request.slot, :length] = request.logprobs
        self.write_at[row] = request.slot * self.outputs.shape[1] + length
        self.limit[row] = request.limit
        self.keys[row] = request.key
        self.temperature[row] = params.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p
        self.num_masked += request.is_masked
        self.num_with_stops += request.stop_strings is not None
        for token in request.stop_token_ids:
            if 0 <= token < len(self.is_stop):
                self.is_stop[token] = True

    def stop(self, request: Request) -> list[int]:
        """Removes `request` and sets its output; returns its blocks. The last row moves into the hole."""
        row = request.row
        last = len(self.requests) - 1
        length = int(self.output_len[row])
        request.output = self.outputs[request.slot, :length].tolist()
        request.logprobs = self.logprobs[request.slot, :length].tolist()
        blocks: list[int] = self.block_tables[row, : self.num_blocks[row]].tolist()
        if row != last:
            self._move(last, row)
        self.requests.pop()
        self._free_slots.append(request.slot)
        self.num_masked -= request.is_masked
        self.num_with_stops -= request.stop_strings is not None
        request.row = request.slot = -1
        return blocks

    def advance(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Appends one token to every row; returns the rows that may have ended (a superset), in order."""
        count = len(self.requests)
        at = self.write_at[:count]
        self._flat_outputs[at] = tokens
        self._flat_logprobs[at] = logprobs
        at += 1
        self.token_ids[:count] = tokens
        self.counters[:, :count] += 1
        return self._at_end(tokens)

    def advance_many(self, tokens: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, block_size: int) -> list[int]:
        """Appends `counts` int32 [D] tokens (at least one each, flat in `tokens`) to the rows; returns as `advance`.

        The caller guarantees that no stop token stands before a row's last one and that `limit` is kept.
        """
        count = len(self.requests)
        ends = np.cumsum(counts)
        at = self.write_at[:count]
        where = np.repeat(at - (ends - counts), counts) + np.arange(len(tokens))
        self._flat_outputs[where] = tokens
        self._flat_logprobs[where] = logprobs
        at += counts
        last = tokens[ends - 1]
        self.token_ids[:count] = last
        self.counters[:, :count] += counts
        block, offset = np.divmod(self.positions[:count], block_size)
        # Where a block opens (offset 0) the scheduler allocates it before the next step.
        np.minimum(block, self.num_blocks[:count] - 1, out=block)
        tables = self.block_tables[np.arange(count), block]
        self.slot_mapping[:count] = tables * block_size + offset
        return self._at_end(last)

    def _at_end(self, last: np.ndarray) -> list[int]:
        """Rows whose newest token, `last` [D], may end the response."""
        count = len(last)
        ended = self.output_len[:count] >= self.limit[:count]
        ended |= self.is_stop[last]
        rows: list[int] = ended.nonzero()[0].tolist()
        return rows

    def add_blocks(self, rows: np.ndarray | int, blocks: np.ndarray | int) -> None:
        """Appends `blocks` [R] to the tables of `rows` [R], one to each; no row twice. Or one block to a row's."""
        self.block_tables[rows, self.num_blocks[rows]] = blocks
        self.num_blocks[rows] += 1

    def drop_blocks(self, row: int, keep: int) -> list[int]:
        """Removes the blocks from index `keep` on from a row's table; returns them."""
        dropped: list[int] = self.block_tables[row, keep : self.num_blocks[row]].tolist()
        self.num_blocks[row] = keep
        return dropped

    def _move(self, source: int, target: int) -> None:
        blocks = self.num_blocks[source]
        self.block_tables[target, :blocks] = self.block_tables[source, :blocks]
        self.counters[:, target] = self.counters[:, source]
        for array in self._row_arrays:
            array[target] = array[source]
        self.requests[target] = moved = self.requests[source]
        moved.row = target

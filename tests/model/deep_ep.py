"""A model of DeepEP and HybridEP on the CPU: what their documentation says, token by token.

Ranks are threads that exchange Python objects. It stands in for `deep_ep` where the checks of
tests/dispatch are to be tested without a GPU; DEFECT makes it wrong in one way.
"""

import threading
import types

import torch

#: Name of the one thing that is wrong, "" for nothing
DEFECT = ""

#: Stands for deep_ep.buffer, whose check of NVLink is taken away
buffer = types.SimpleNamespace(check_nvlink_connections=None)


class World:
    """What the ranks of a job share."""

    def __init__(self, ranks):
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._slots = [None] * ranks

    def barrier(self):
        self._barrier.wait()

    def exchange(self, rank, value):
        """Every rank's value, in the order of ranks."""
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


class Event:
    def current_stream_wait(self):
        pass


class Config:
    def __init__(self, sms, *chunks):
        self.sms = sms

    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return 1 << 16


class Buffer:
    def __init__(self, group, nvl_bytes, rdma_bytes=0, low_latency_mode=False, **more):
        self.world, self.rank = group.world, group.rank
        self._nvl = torch.zeros(nvl_bytes, dtype=torch.uint8)

    @staticmethod
    def set_num_sms(number):
        assert number % 2 == 0

    @staticmethod
    def capture():
        return Event()

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts):
        return 1 << 20

    def destroy(self):
        pass

    def get_local_buffer_tensor(self, dtype):
        return self._nvl.view(dtype)

    def get_dispatch_layout(self, topk_idx, experts):
        ranks, local = self.world.ranks, experts // self.world.ranks
        per_rank = torch.zeros(ranks, dtype=torch.int32)
        per_expert = torch.zeros(experts, dtype=torch.int32)
        in_rank = torch.zeros(topk_idx.size(0), ranks, dtype=torch.bool)
        for token, chosen in enumerate(topk_idx.tolist()):
            for expert in {e for e in chosen if e >= 0}:
                per_expert[expert] += 1
                in_rank[token, expert // local] = True
        for rank in range(ranks):
            per_rank[rank] = int(in_rank[:, rank].sum())
        if DEFECT == "layout counts one too many":
            per_rank[-1] += 1
        return per_rank, None, per_expert, in_rank, Event()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1,
        num_worst_tokens=0, config=None, **asynchronous,
    ):  # fmt: skip
        values, scales = x if isinstance(x, tuple) else (x, None)
        in_rank = handle[4] if handle else is_token_in_rank
        experts = None if handle else num_tokens_per_expert.size(0)
        everyone = self.world.exchange(
            self.rank, (values, scales, in_rank, topk_idx, topk_weights, num_tokens_per_expert)
        )
        rows = [
            (source, token)
            for source in range(self.world.ranks)
            for token in range(len(everyone[source][0]))
            if everyone[source][2][token, self.rank]
        ]
        if DEFECT == "two rows swapped" and len(rows) > 1:
            rows[0], rows[-1] = rows[-1], rows[0]
        if DEFECT == "handle ignored" and handle and rows:
            rows = rows[::-1]
        size = num_worst_tokens or len(rows)
        got = torch.full((size, values.size(1)), 0).to(values.dtype)
        got_scales = None if scales is None else torch.zeros(size, scales.size(1))
        for row, (source, token) in enumerate(rows):
            got.view(torch.uint8)[row] = everyone[source][0].view(torch.uint8)[token]
            if scales is not None:
                got_scales[row] = everyone[source][1][token]
        if DEFECT == "end of a row not written" and rows:
            got.view(torch.uint8)[len(rows) - 1, -16:] = 0x7F
        if DEFECT == "scales of the first token" and scales is not None and len(rows) > 1:
            got_scales[1] = got_scales[0]
        answer = got if scales is None else (got, got_scales)
        if handle:
            return answer, None, None, None, None, Event()
        local = experts // self.world.ranks
        got_idx = got_weights = None
        if topk_idx is not None:
            got_idx, got_weights = self._topk(everyone, rows, size, local)
            if DEFECT == "unused rows keep indices" and num_worst_tokens:
                got_idx[len(rows) :] = 0
        counts = []
        for expert in range(self.rank * local, (self.rank + 1) * local):
            number = sum(int(given[5][expert]) for given in everyone)
            step = 1 if DEFECT == "alignment ignored" else expert_alignment
            counts.append((number + step - 1) // step * step)
        source_token = torch.tensor([token for _, token in rows], dtype=torch.int32)
        if DEFECT == "source token wrong" and rows:
            source_token[-1] += 1
        if num_worst_tokens:
            padding = torch.zeros(size - len(rows), dtype=torch.int32)
            source_token = torch.cat([source_token, padding])
        handle = (None, None, None, source_token, in_rank, rows)
        return answer, got_idx, got_weights, [] if num_worst_tokens else counts, handle, Event()

    def _topk(self, everyone, rows, size, local):
        topk = everyone[self.rank][3].size(1)
        got_idx = torch.full((size, topk), -1)
        got_weights = torch.zeros(size, topk)
        for row, (source, token) in enumerate(rows):
            for column, expert in enumerate(everyone[source][3][token].tolist()):
                here = expert // local == self.rank and expert >= 0
                if here:
                    got_idx[row, column] = expert - self.rank * local
                if here or DEFECT == "weights of other ranks' experts":
                    got_weights[row, column] = everyone[source][4][token, column]
        if DEFECT == "expert of another rank" and rows:
            got_idx[0, got_idx[0].argmax()] = (int(got_idx[0].max()) + 1) % local
        return got_idx, got_weights

    def combine(self, x, handle, topk_weights=None, bias=None, config=None, **asynchronous):
        rows, in_rank = handle[5], handle[4]
        everyone = self.world.exchange(self.rank, (rows, x, topk_weights))
        biases = bias if isinstance(bias, tuple) else (() if bias is None else (bias,))
        total = torch.zeros(in_rank.size(0), x.size(1))
        weights = None if topk_weights is None else torch.zeros(len(total), topk_weights.size(1))
        for other, (their_rows, their_x, their_weights) in enumerate(everyone):
            if DEFECT == "last rank left out of the sum" and other == len(everyone) - 1:
                continue
            for row, (source, token) in enumerate(their_rows):
                if source == self.rank:
                    total[token] += their_x[row].float()
                    if DEFECT == "sum kept in bfloat16":
                        total[token] = total[token].bfloat16().float()
                    if weights is not None:
                        weights[token] += their_weights[row]
        for given in biases:
            if DEFECT != "bias left out":
                total += given.float()
        out = total.to(torch.bfloat16)
        if DEFECT == "sum truncated":
            out = (total.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)
        if DEFECT == "top-k weights not combined" and weights is not None:
            weights *= 0
        return out, weights, Event()

    def clean_low_latency_buffer(self, *sizes):
        pass

    def low_latency_dispatch(
        self, x, topk_idx, max_tokens, experts, use_fp8=True, async_finish=False,
        return_recv_hook=False,
    ):  # fmt: skip
        ranks, local = self.world.ranks, experts // self.world.ranks
        everyone = self.world.exchange(self.rank, (x, topk_idx))
        slots, hidden = max_tokens * ranks, x.size(1)
        got = torch.zeros(local, slots, hidden, dtype=torch.bfloat16)
        count = torch.zeros(local, dtype=torch.int32)
        source = torch.zeros(local, slots, dtype=torch.int32)
        ranges = torch.zeros(local, ranks, dtype=torch.int64)
        for expert in range(local):
            row = 0
            for rank, (their_x, their_idx) in enumerate(everyone):
                begin = row
                # In any order: here the last first
                for token in reversed(range(len(their_x))):
                    if self.rank * local + expert in their_idx[token].tolist():
                        got[expert, row], source[expert, row] = their_x[token], token
                        row += 1
                ranges[expert, rank] = begin << 32 | row - begin
            count[expert] = row
            if DEFECT == "two rows swapped" and row > 1:
                got[expert, :2] = got[expert, :2].flip(0)
        handle = (source, ranges, max_tokens, hidden, experts)
        if use_fp8:
            blocks = got.float().view(local, slots, -1, 128)
            scales = blocks.abs().amax(dim=3).clamp(min=1e-4) / 448
            if DEFECT == "scales of the first token":
                scales[:, 1:] = scales[:, :1]
            values = (blocks / scales.unsqueeze(3)).to(torch.float8_e4m3fn)
            got = (values.view(local, slots, hidden), scales)
        return got, count, handle, Event(), lambda: None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, out=None, async_finish=False,
        return_recv_hook=False,
    ):  # fmt: skip
        source, ranges = handle[:2]
        local = handle[4] // self.world.ranks
        everyone = self.world.exchange(self.rank, (x, source, ranges))
        total = torch.zeros(out.shape)
        for token, chosen in enumerate(topk_idx.tolist()):
            for column, expert in enumerate(chosen):
                if expert < 0:
                    continue
                their_x, their_source, their_ranges = everyone[expert // local]
                begin = int(their_ranges[expert % local, self.rank]) >> 32
                size = int(their_ranges[expert % local, self.rank]) & 0xFFFFFFFF
                tokens = their_source[expert % local, begin : begin + size].tolist()
                row = their_x[expert % local, begin + tokens.index(token)].float()
                weight = (
                    1 if DEFECT == "weights left out of the sum" else topk_weights[token, column]
                )
                total[token] += row * weight
        out.copy_(total.to(torch.bfloat16))
        return out, Event(), lambda: None


class HybridEPBuffer:
    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8):
        self.world, self.rank = group.world, group.rank
        self.local = num_local_experts

    def _rows(self, hidden, scaling_factor, routing_map, probs):
        everyone = self.world.exchange(self.rank, (hidden, scaling_factor, routing_map, probs))
        mine = slice(self.rank * self.local, (self.rank + 1) * self.local)
        rows = [
            (source, token)
            for source, given in enumerate(everyone)
            for token in range(len(given[0]))
            if given[2][token, mine].any()
        ]
        if DEFECT == "two rows swapped" and len(rows) > 1:
            rows[0], rows[-1] = rows[-1], rows[0]
        return everyone, rows, mine

    def dispatch(self, hidden, scaling_factor, routing_map, probs, handle=None):
        everyone, rows, mine = self._rows(hidden, scaling_factor, routing_map, probs)
        if DEFECT == "handle ignored" and handle:
            rows = rows[::-1]
        got = torch.zeros(len(rows), hidden.size(1), dtype=hidden.dtype)
        got_probs = None if probs is None else torch.full((len(rows), probs.size(1)), 7.0)
        scales = None if scaling_factor is None else torch.zeros(len(rows), scaling_factor.size(1))
        local_map = torch.zeros(len(rows), self.local, dtype=torch.bool)
        for row, (source, token) in enumerate(rows):
            got[row] = everyone[source][0][token]
            if probs is not None:
                got_probs[row, mine] = everyone[source][3][token, mine]
            local_map[row] = everyone[source][2][token, mine]
            if scales is not None:
                scales[row] = everyone[source][1][token]
        if DEFECT == "weights of other ranks' experts" and rows and probs is not None:
            got_probs[0, mine] = 7
        size = torch.tensor(len(rows))
        return got, got_probs, scales, (rows, None, None, size, local_map, len(hidden), None)

    def combine(self, hidden, probs, handle):
        return self._sum(hidden, probs, handle[0], handle[5])

    def _sum(self, hidden, probs, rows, tokens):
        everyone = self.world.exchange(self.rank, (rows, hidden, probs))
        total = torch.zeros(tokens, hidden.size(1))
        weights = None if probs is None else torch.zeros(tokens, probs.size(1))
        for other, (their_rows, their_x, their_probs) in enumerate(everyone):
            if DEFECT == "last rank left out of the sum" and other == len(everyone) - 1:
                continue
            for row, (source, token) in enumerate(their_rows):
                if source == self.rank:
                    total[token] += their_x[row].float()
                    if weights is not None:
                        weights[token] += their_probs[row]
        return total.to(torch.bfloat16), weights

    def dispatch_with_permute(
        self, hidden, scaling_factor, routing_map, probs, pad_multiple, fuse_permute_dispatch
    ):
        everyone, rows, mine = self._rows(hidden, scaling_factor, routing_map, probs)
        order, counts = [], []
        for expert in range(self.local):
            chosen = [r for r in rows if everyone[r[0]][2][r[1], mine][expert]]
            size = -(-len(chosen) // pad_multiple) * pad_multiple
            order += [(row, expert) for row in chosen] + [None] * (size - len(chosen))
            counts.append(size)
        got = torch.zeros(len(order), hidden.size(1), dtype=hidden.dtype)
        got_probs = torch.zeros(len(order))
        for place, entry in enumerate(order):
            if entry is not None:
                (source, token), expert = entry
                got[place] = everyone[source][0][token]
                got_probs[place] = everyone[source][3][token, mine][expert]
            elif DEFECT == "padding not written":
                got[place] = 7
        handle = (rows, order, len(hidden), probs.size(1), mine)
        return got, got_probs, None, torch.tensor(counts), handle

    def combine_with_unpermute(self, hidden, probs, handle, pad_multiple, fuse_unpermute_combine):
        rows, order, tokens, experts, mine = handle
        sums = {row: torch.zeros(hidden.size(1)) for row in rows}
        weights = torch.zeros(len(rows), experts)
        for place, entry in enumerate(order):
            if entry is not None:
                row, expert = entry
                sums[row] += hidden[place].float()
                weights[rows.index(row), mine.start + expert] = probs[place]
        packed = torch.stack([sums[row] for row in rows]) if rows else hidden[:0].float()
        return self._sum(packed.to(torch.bfloat16), weights, rows, tokens)

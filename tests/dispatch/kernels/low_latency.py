"""DeepEP's low-latency kernels, which use NVSHMEM's IBGDA also within a node."""

import dataclasses

import torch

from .. import cases as all_cases
from .. import reference
from ..checks import Checks
from ..inputs import FP8_BLOCK, FP8_MAX, make_inputs
from .common import poison_outputs, skip_nvlink_check

#: Tokens of a rank that the buffer has room for
MAX_TOKENS = 128


class Kernels:
    """A low-latency buffer over all ranks of a job. Raises what DeepEP and NVSHMEM raise."""

    def __init__(self, job):
        import deep_ep

        self.job = job
        skip_nvlink_check(job, deep_ep)
        widest, case = max(c.hidden for c in all_cases.LOW_LATENCY), all_cases.LOW_LATENCY[0]
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            MAX_TOKENS, widest, job.ranks, case.num_experts(job.ranks)
        )
        self.buffer = deep_ep.Buffer(
            job.group, 0, size, low_latency_mode=True, explicitly_destroy=True,
            num_qps_per_rank=case.local_experts,
        )  # fmt: skip

    def close(self):
        self.buffer.destroy()

    def run(self, case):
        """Dispatches and combines a case, and returns the Checks of every element."""
        checks, job = Checks(), self.job
        inputs = [_plain_inputs(case, rank, job) for rank in range(job.ranks)]
        mine, experts = inputs[job.rank], case.num_experts(job.ranks)
        slots = MAX_TOKENS * job.ranks
        self.buffer.clean_low_latency_buffer(MAX_TOKENS, case.hidden, experts)
        poison_outputs(job, 2 * case.hidden * slots * case.local_experts)
        job.barrier()
        way = dict(async_finish=case.mode == "async", return_recv_hook=case.mode == "hook")
        got, count, handle, event, hook = self.buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, MAX_TOKENS, experts, use_fp8=case.dtype == "fp8", **way
        )
        _finish(case, event, hook)
        sent = torch.zeros(
            case.local_experts, slots, case.hidden, dtype=torch.bfloat16, device=job.device
        )
        for expert in range(case.local_experts):
            self._check_expert(checks, case, inputs, expert, got, count, handle, sent)
        out = torch.empty_like(mine.x)
        poison_outputs(job, 2 * case.hidden * case.tokens)
        job.barrier()
        combined, event, hook = self.buffer.low_latency_combine(
            sent, mine.topk_idx, mine.topk_weights, handle, out=out, **way
        )
        _finish(case, event, hook)
        self._check_combine(checks, case, mine, combined)
        return checks

    def _check_expert(self, checks, case, inputs, expert, got, count, handle, sent):
        """One local expert's rows; those of a sender come in the order in which they arrive."""
        job = self.job
        number = job.rank * case.local_experts + expert
        source, ranges = handle[0][expert].cpu(), handle[1][expert].cpu()
        rows, wanted, places = [], [], []
        for rank, given in enumerate(inputs):
            begin, size = int(ranges[rank]) >> 32, int(ranges[rank]) & 0xFFFFFFFF
            tokens = (given.topk_idx == number).any(dim=1).nonzero().squeeze(1)
            arrived = source[begin : begin + size].to(job.device).long()
            name = "dispatch: tokens of rank {} for expert {}".format(rank, number)
            checks.exact(name, arrived.sort().values, tokens)
            if not checks.results[-1]["ok"]:
                return
            rows.append(torch.arange(begin, begin + size, device=job.device))
            wanted.append(given.x[arrived])
            places.append(arrived)
        rows, want = torch.cat(rows), torch.cat(wanted)
        checks.equal("dispatch: rows of expert {}".format(number), int(count[expert]), len(rows))
        name = "dispatch: rows' values of expert {}".format(number)
        if case.dtype == "fp8":
            values, scales = got[0][expert][rows], got[1][expert][rows]
            bound, expected = fp8_bound(want)
            checks.within(name, values.double() * _spread(scales), want.double(), bound)
            checks.within(name + ": scales", scales, expected, expected * 2.0**-20)
        else:
            checks.exact(name, got[expert][rows], want)
        # Made of what was sent, so that the sum is known without knowing how it was cast
        sent[expert][rows] = _expert(want, number)

    def _check_combine(self, checks, case, mine, got):
        total = torch.zeros(mine.x.shape, dtype=torch.float64, device=got.device)
        magnitude = torch.zeros_like(total)
        for column in range(case.topk):
            expert = mine.topk_idx[:, column : column + 1]
            weight = torch.where(
                expert >= 0, mine.topk_weights[:, column : column + 1].double(), 0.0
            )
            term = _expert(mine.x, expert.clamp(min=0)).double() * weight
            total += term
            magnitude += term.abs()
        # A product and a sum for each expert
        bound = reference.combine_bound(total, magnitude, 2 * case.topk)
        checks.within("combine", got, total, bound)

    def bandwidth(self, tokens, hidden, topk):
        """Functions (dispatch, combine, bytes received here) of a shape."""
        job = self.job
        case = all_cases.Case(
            "bandwidth", tokens=min(tokens, MAX_TOKENS), hidden=hidden, topk=topk
        )
        mine, experts = _plain_inputs(case, job.rank, job), case.num_experts(job.ranks)

        def dispatch():
            return self.buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, MAX_TOKENS, experts, use_fp8=False
            )

        got, count, handle = dispatch()[:3]
        rows = got.clone()
        return (
            dispatch,
            lambda: self.buffer.low_latency_combine(
                rows, mine.topk_idx, mine.topk_weights, dispatch()[2]
            ),
            int(count.sum()) * hidden * 2,
        )


def _expert(x, number):
    """Stand-in for an expert: bfloat16 rows of bfloat16 x, another function for each number."""
    return (x.float() * (1.0 + number * 0.25)).to(torch.bfloat16)


def _plain_inputs(case, rank, job):
    """Inputs in bfloat16: these kernels make FP8 of them by themselves."""
    return make_inputs(dataclasses.replace(case, dtype="bf16"), rank, job.ranks, job.device)


def _finish(case, event, hook):
    if case.mode == "hook":
        hook()
    elif case.mode == "async":
        event.current_stream_wait()


def _spread(scales):
    return scales.double().repeat_interleave(FP8_BLOCK, dim=1)


def fp8_bound(x):
    """(bound of an element, scale of a block), float64, of bfloat16 [rows, hidden] cast to FP8.

    E4M3 has 3 bits after the point: half a unit is 2^-4 of a normal number, and 2^-10 of the scale
    below 2^-6. Scales are a block's largest value by 448, of at least 1e-4.
    """
    blocks = x.double().abs().view(x.size(0), x.size(1) // FP8_BLOCK, FP8_BLOCK)
    scales = blocks.amax(dim=2).clamp(min=1e-4) / FP8_MAX
    bound = x.double().abs() * 2.0**-4 + _spread(scales) * 2.0**-10
    return bound * (1 + 2.0**-16), scales

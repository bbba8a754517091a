"""DeepEP's normal-mode kernels within a node: layout, dispatch, combine over NVLink buffers."""

import functools

import torch

from .. import cases as all_cases
from .. import reference
from ..checks import Checks
from ..inputs import POISON, from_fp8, make_inputs
from .common import poison_outputs, skip_nvlink_check

#: SMs of DeepEP's own default
NUM_SMS = 20
#: Tokens per channel and peer that the NVLink buffers hold; DeepEP's default, and one that wraps
# (fewer than the receiving warps of combine would wait for each other)
CHUNKS, SMALL_CHUNKS = (8, 256), (4, 32)


class Kernels:
    """A buffer over all ranks of a job. Raises what DeepEP raises."""

    def __init__(self, job):
        import deep_ep

        self.job, self.deep_ep = job, deep_ep
        skip_nvlink_check(job, deep_ep)
        # Ranks that share a GPU under MPS run at the same time and share its SMs
        available = torch.cuda.get_device_properties(job.device).multi_processor_count
        share = available // job.ranks_on_gpu if job.mps else available
        self.num_sms = min(NUM_SMS, share // 2 * 2)
        deep_ep.Buffer.set_num_sms(self.num_sms)
        widest = 2 * max(case.hidden for case in all_cases.INTRANODE)
        size = self.config(CHUNKS).get_nvl_buffer_size_hint(widest, job.ranks)
        self.buffer = deep_ep.Buffer(job.group, size, 0, explicitly_destroy=True)

    def config(self, chunks):
        return self.deep_ep.Config(self.num_sms, *chunks)

    def close(self):
        self.buffer.destroy()

    def poison(self, rows, width):
        """Overwrites this rank's buffer, and memory that outputs will be made of."""
        self.job.barrier()
        self.buffer.get_local_buffer_tensor(torch.uint8).fill_(POISON)
        poison_outputs(self.job, rows * width)
        self.job.barrier()

    def run(self, case):
        """Dispatches and combines a case, and returns the Checks of every element."""
        checks, job = Checks(), self.job
        inputs = [make_inputs(case, rank, job.ranks, job.device) for rank in range(job.ranks)]
        mine = inputs[job.rank]
        want = reference.received(case, inputs, job.rank)
        config = self.config(SMALL_CHUNKS if case.small_chunks else CHUNKS)

        layout = self.buffer.get_dispatch_layout(mine.topk_idx, case.num_experts(job.ranks))
        expected = reference.layout(mine.topk_idx, case.num_experts(job.ranks), job.ranks)
        checks.exact("layout: tokens per rank", layout[0], expected.tokens_per_rank)
        checks.exact("layout: tokens per expert", layout[2], expected.tokens_per_expert)
        checks.exact("layout: token in rank", layout[3], expected.is_token_in_rank)

        x = mine.x if mine.scales is None else (mine.x, mine.scales)
        routing = dict(
            num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2], expert_alignment=case.alignment,
        )  # fmt: skip
        if case.weights:
            routing.update(topk_idx=mine.topk_idx, topk_weights=mine.topk_weights)
        rows = sum(case.num_tokens(rank, job.ranks) for rank in range(job.ranks))
        if case.mode == "worst":
            routing.update(num_worst_tokens=rows)
        self.poison(rows, 2 * case.hidden)
        got = self._call(case, self.buffer.dispatch, x=x, config=config, **routing)
        got_x, got_idx, got_weights, per_expert, handle = got[:5]
        self._check_dispatch(checks, "dispatch", case, got_x, want)
        if case.weights:
            received = len(want.source)
            checks.exact("dispatch: top-k indices", got_idx[:received], want.topk_idx)
            checks.exact("dispatch: top-k weights", got_weights[:received], want.topk_weights)
            if case.mode == "worst":
                rest = got_idx[received:]
                checks.exact("dispatch: indices of unused rows", rest, torch.full_like(rest, -1))
        if case.mode != "worst":
            step = case.alignment
            counts = [-(-count // step) * step for count in want.per_expert]
            checks.equal("dispatch: tokens per expert", per_expert, counts)
            checks.exact("dispatch: source token", handle[3], want.token.to(torch.int32))
        if case.mode == "cached":
            self.poison(rows, 2 * case.hidden)
            again = self._call(case, self.buffer.dispatch, x=x, handle=handle, config=config)
            self._check_dispatch(checks, "dispatch by handle", case, again[0], want)
        self._combine(checks, case, inputs, config, handle, got_x)
        return checks

    def _call(self, case, function, **arguments):
        if case.mode != "async":
            return function(**arguments)
        arguments.update(
            previous_event=self.buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        result = function(**arguments)
        result[-1].current_stream_wait()
        return result

    def _check_dispatch(self, checks, name, case, got, want):
        received = len(want.source)
        if case.dtype == "fp8":
            got, scales = got
            checks.exact(name + ": scales", scales[:received], want.scales)
        if case.mode != "worst":
            checks.equal(name + ": rows", got.size(0), received)
        checks.exact(name + ": rows' values", got[:received], want.x)

    def _combine(self, checks, case, inputs, config, handle, got_x):
        job, received = self.job, handle[3].size(0)

        @functools.lru_cache(maxsize=None)
        def outputs_of(rank):
            got = reference.received(case, inputs, rank)
            x = got.x if case.dtype == "bf16" else from_fp8(got.x, got.scales)
            return got, reference.expert_output(x, got.topk_idx, got.topk_weights, rank)

        want, rows = outputs_of(job.rank)
        # What was received goes through the experts, so an error of dispatch is not hidden
        valid = len(want.source)
        x = got_x if case.dtype == "bf16" else from_fp8(*got_x)
        sent = torch.full((received, case.hidden), 0, dtype=torch.bfloat16, device=job.device)
        sent[:valid] = reference.expert_output(
            x[:valid], want.topk_idx, want.topk_weights, job.rank
        )
        checks.exact("experts' output", sent[:valid], rows)
        mine = inputs[job.rank]
        arguments = dict(x=sent, handle=handle, config=config)
        if case.weights:
            weights = torch.zeros(received, case.topk, device=job.device)
            weights[:valid] = want.topk_weights
            arguments["topk_weights"] = weights
        if mine.biases:
            arguments["bias"] = mine.biases if len(mine.biases) > 1 else mine.biases[0]
        self.poison(mine.x.size(0), 2 * case.hidden)
        got, got_weights, _ = self._call(case, self.buffer.combine, **arguments)
        total, magnitude = reference.combined(case, inputs, outputs_of, job.rank)
        bound = reference.combine_bound(total, magnitude, job.ranks + len(mine.biases))
        checks.within("combine", got, total, bound)
        if case.weights:
            none = torch.zeros_like(mine.topk_weights)
            chosen = torch.where(mine.topk_idx >= 0, mine.topk_weights, none)
            checks.exact("combine: top-k weights", got_weights, chosen)

    def bandwidth(self, tokens, hidden, topk):
        """Functions (dispatch, combine, bytes received here) of a shape, by a cached handle."""
        job = self.job
        case = all_cases.Case("bandwidth", tokens=tokens, hidden=hidden, topk=topk)
        mine = make_inputs(case, job.rank, job.ranks, job.device)
        layout = self.buffer.get_dispatch_layout(mine.topk_idx, case.num_experts(job.ranks))
        got = self.buffer.dispatch(
            mine.x, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2], topk_idx=mine.topk_idx,
            topk_weights=mine.topk_weights, config=self.config(CHUNKS),
        )  # fmt: skip
        rows, handle = got[0], got[4]
        config = self.config(CHUNKS)
        return (
            lambda: self.buffer.dispatch(mine.x, handle=handle, config=config),
            lambda: self.buffer.combine(rows, handle, config=config),
            rows.numel() * rows.element_size(),
        )

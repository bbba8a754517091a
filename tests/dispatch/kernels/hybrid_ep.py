"""HybridEP's kernels within a node: metadata, dispatch, combine, with and without permutation.

Its kernels are compiled at run time for each shape, by $CUDA_HOME/bin/nvcc.
"""

import dataclasses
import functools

import torch

from .. import cases as all_cases
from .. import reference
from ..checks import Checks
from ..inputs import from_fp8, make_inputs
from .common import poison_outputs


class Kernels:
    """Buffers over all ranks of a job, one of each data type. Raises what HybridEP raises."""

    def __init__(self, job):
        import deep_ep

        self.job, self.deep_ep = job, deep_ep
        # It gathers CUDA tensors, which gloo does not
        torch.distributed.all_gather = functools.partial(_all_gather, torch.distributed.all_gather)
        self._buffers = {}

    def buffer(self, case):
        """The HybridEPBuffer of a case's data type and width."""
        key = (case.dtype, case.hidden, case.local_experts)
        if key not in self._buffers:
            self._buffers[key] = self.deep_ep.HybridEPBuffer(
                group=self.job.group,
                hidden_dim=case.hidden,
                max_num_of_tokens_per_rank=512,
                num_local_experts=case.local_experts,
                use_fp8=case.dtype == "fp8",
            )
        return self._buffers[key]

    def close(self):
        self.job.barrier()
        self._buffers.clear()

    def poison(self, case):
        """Overwrites memory that outputs will be made of; the buffers are HybridEP's own."""
        poison_outputs(self.job, 2 * case.hidden * case.tokens * self.job.ranks * case.topk)
        self.job.barrier()

    def run(self, case):
        """Dispatches and combines a case, and returns the Checks of every element."""
        checks, job = Checks(), self.job
        inputs = [make_inputs(case, rank, job.ranks, job.device) for rank in range(job.ranks)]
        mine = inputs[job.rank]
        experts = case.num_experts(job.ranks)
        routing, probs = multihot(mine.topk_idx, mine.topk_weights, experts)
        x = mine.x if case.dtype == "bf16" else mine.x.view(torch.uint8)
        buffer = self.buffer(case)
        self.poison(case)
        run = self._permuted if case.mode in ("permuted", "fused") else self._plain
        run(
            checks, case, inputs, buffer,
            dict(
                hidden=x, scaling_factor=mine.scales, routing_map=routing,
                probs=probs if case.weights else None,
            ),
        )  # fmt: skip
        return checks

    def _plain(self, checks, case, inputs, buffer, arguments):
        job, local = self.job, case.local_experts
        want = reference.received(case, inputs, job.rank)
        first, rows = job.rank * local, len(want.source)
        got, got_probs, got_scales, handle = buffer.dispatch(**arguments)
        if case.mode == "cached":
            self.poison(case)
            got, got_probs, got_scales, handle = buffer.dispatch(**arguments, handle=handle)
        checks.equal("dispatch: rows", int(handle[3].cpu()), rows)
        got, mine = got[:rows], slice(first, first + local)
        checks.exact("dispatch: rows' values", got, want.x.view(got.dtype))
        if case.dtype == "fp8":
            checks.exact("dispatch: scales", got_scales[:rows], want.scales)
        routing, probs = multihot(want.topk_idx, want.topk_weights, local)
        checks.exact("dispatch: local experts", handle[4][:rows], routing)
        weights = None
        if case.weights:
            checks.exact("dispatch: weights", got_probs[:rows, mine], probs)
            # Of other ranks' experts a rank has nothing to say
            weights = torch.zeros_like(got_probs)
            weights[:rows, mine] = probs
        x = got
        if case.dtype == "fp8":
            x = from_fp8(got.view(torch.float8_e4m3fn), got_scales[:rows])
        sent = self._experts(case, want, x, job.rank)
        self.poison(case)
        got, got_probs = buffer.combine(sent, weights, handle)
        self._check_combine(checks, case, inputs, got, got_probs, arguments["probs"], 1)

    def _permuted(self, checks, case, inputs, buffer, arguments):
        job = self.job
        want = reference.received(case, inputs, job.rank)
        got, got_probs, _, per_expert, handle = buffer.dispatch_with_permute(
            pad_multiple=case.alignment, fuse_permute_dispatch=case.mode == "fused", **arguments
        )
        order, valid = permutation(want, case.local_experts, case.alignment)
        step = case.alignment
        checks.equal(
            "dispatch: tokens per expert",
            [int(n) for n in per_expert.cpu()],
            [-(-n // step) * step for n in want.per_expert],
        )
        x = torch.where(valid.unsqueeze(1), want.x[order], torch.zeros_like(want.x[order]))
        checks.exact("dispatch: rows' values by expert", got, x)
        _, probs = multihot(want.topk_idx, want.topk_weights, case.local_experts)
        column = torch.repeat_interleave(
            torch.arange(case.local_experts, device=job.device), per_expert.to(job.device).long()
        )
        expected = torch.where(valid, probs[order, column], torch.zeros_like(got_probs))
        checks.exact("dispatch: weights by expert", got_probs, expected)
        factor = (1.0 + column * 0.25 + job.rank * 0.5) * got_probs
        sent = (got.float() * factor.unsqueeze(1)).to(torch.bfloat16)
        self.poison(case)
        got, got_probs = buffer.combine_with_unpermute(
            hidden=sent, probs=got_probs, handle=handle, pad_multiple=case.alignment,
            fuse_unpermute_combine=case.mode == "fused",
        )  # fmt: skip
        self._check_combine(checks, case, inputs, got, got_probs, arguments["probs"], 2)

    def _experts(self, case, want, x, rank):
        return reference.expert_output(x, want.topk_idx, want.topk_weights, rank)

    def _check_combine(self, checks, case, inputs, got, got_probs, probs, roundings):
        """roundings: how often a token's sum is rounded to bfloat16: once, or once on each rank
        (where the rows of several experts are added) and once more."""
        job = self.job

        @functools.lru_cache(maxsize=None)
        def outputs_of(rank):
            want = reference.received(case, inputs, rank)
            x = want.x if case.dtype == "bf16" else from_fp8(want.x, want.scales)
            if roundings == 1:
                return want, self._experts(case, want, x, rank)
            return _by_expert(want, x, rank)

        total, magnitude = reference.combined(case, inputs, outputs_of, job.rank)
        terms = job.ranks if roundings == 1 else case.topk
        bound = reference.combine_bound(total, magnitude, terms, roundings)
        checks.within("combine", got, total, bound)
        if case.weights:
            checks.exact("combine: weights", got_probs, probs)

    def bandwidth(self, tokens, hidden, topk):
        """Functions (dispatch, combine, bytes received here) of a shape, by a cached handle."""
        case = all_cases.Case("bandwidth", tokens=tokens, hidden=hidden, topk=topk)
        mine = make_inputs(case, self.job.rank, self.job.ranks, self.job.device)
        routing, probs = multihot(
            mine.topk_idx, mine.topk_weights, case.num_experts(self.job.ranks)
        )
        buffer = self.buffer(case)
        rows, row_probs, _, handle = buffer.dispatch(
            hidden=mine.x, routing_map=routing, probs=probs
        )
        return (
            lambda: buffer.dispatch(
                hidden=mine.x, routing_map=routing, probs=probs, handle=handle
            ),
            lambda: buffer.combine(rows, row_probs, handle),
            rows.numel() * rows.element_size(),
        )


def multihot(topk_idx, topk_weights, experts):
    """(map, weights), [tokens, experts] bool and float32, of [tokens, topk] indices (-1: none)."""
    shape = (topk_idx.size(0), experts + 1)
    routing = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device)
    weights = torch.zeros(shape, device=topk_idx.device)
    # Column 0 takes the -1
    routing.scatter_(1, topk_idx + 1, True)
    weights.scatter_(1, topk_idx + 1, topk_weights)
    return routing[:, 1:].contiguous(), weights[:, 1:].contiguous()


def permutation(want, experts, alignment):
    """(rows, valid): the order of rows by local expert, each expert padded to the alignment.

    rows: index into want's rows (0 for padding); valid: False for padding.
    """
    rows, valid = [], []
    for expert in range(experts):
        chosen = (want.topk_idx == expert).any(dim=1).nonzero().squeeze(1)
        padding = -len(chosen) % alignment
        rows.append(torch.cat([chosen, chosen.new_zeros(padding)]))
        valid.append(torch.arange(len(rows[-1]), device=chosen.device) < len(chosen))
    return torch.cat(rows), torch.cat(valid)


def _by_expert(want, x, rank):
    """(rows, values): one row for each token and expert, as the experts of a rank give them."""
    tokens, columns = (want.topk_idx >= 0).nonzero(as_tuple=True)
    expert = want.topk_idx[tokens, columns]
    factor = (1.0 + expert * 0.25 + rank * 0.5) * want.topk_weights[tokens, columns]
    values = (x[tokens].float() * factor.unsqueeze(1)).to(torch.bfloat16)
    rows = dataclasses.replace(want, source=want.source[tokens], token=want.token[tokens])
    return rows, values


def _all_gather(gather, tensors, tensor, group=None, async_op=False):
    if not tensor.is_cuda:
        return gather(tensors, tensor, group, async_op)
    parts = [torch.empty_like(tensor, device="cpu") for _ in tensors]
    gather(parts, tensor.cpu(), group)
    for target, part in zip(tensors, parts):
        target.copy_(part)
    return None

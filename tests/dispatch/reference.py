"""What dispatch and combine have to give, in plain PyTorch, and how far they may be off.

Written from DeepEP's documented semantics, not from its kernels. Dispatch only copies: exact, bit
by bit. Combine sums one bfloat16 row of each rank in float32 and rounds once; the bound follows
from that (see combine_bound).
"""

import dataclasses

import torch

#: Unit roundoff of bfloat16 (8 bits of significand) and of float32 (24)
U_BF16, U_F32 = 2.0**-8, 2.0**-24
#: Smallest normal number of both; what underflows below it is off by no more
TINY = 2.0**-126


@dataclasses.dataclass
class Layout:
    """Where tokens go. tokens_per_rank: [ranks] int32; tokens_per_expert: [experts] int32;
    is_token_in_rank: [tokens, ranks] bool."""

    tokens_per_rank: torch.Tensor
    tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def layout(topk_idx, experts, ranks):
    """Layout of tokens with expert indices [tokens, topk], -1 for none."""
    chosen = torch.zeros(topk_idx.size(0), experts + 1, dtype=torch.bool, device=topk_idx.device)
    # Column 0 takes the -1
    chosen.scatter_(1, topk_idx + 1, True)
    chosen = chosen[:, 1:]
    in_rank = chosen.view(topk_idx.size(0), ranks, experts // ranks).any(dim=2)
    return Layout(
        in_rank.sum(dim=0, dtype=torch.int32), chosen.sum(dim=0, dtype=torch.int32), in_rank
    )


@dataclasses.dataclass
class Received:
    """What a rank receives, ordered by sending rank, then by token.

    x, scales, topk_weights as sent; topk_idx: local expert or -1, weights 0 where -1;
    source: [rows] rank, token: [rows] token of that rank; per_expert: tokens of each local expert.
    """

    x: torch.Tensor
    scales: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    source: torch.Tensor
    token: torch.Tensor
    per_expert: list


def received(case, inputs, rank):
    """Received of a rank, from the inputs of all ranks (a list of Inputs)."""
    local = case.local_experts
    first = rank * local
    parts = []
    for source, sent in enumerate(inputs):
        mine = (sent.topk_idx >= first) & (sent.topk_idx < first + local)
        token = mine.any(dim=1).nonzero().squeeze(1)
        mine = mine[token]
        parts.append(
            (
                sent.x[token],
                None if sent.scales is None else sent.scales[token],
                torch.where(mine, sent.topk_idx[token] - first, -1),
                torch.where(mine, sent.topk_weights[token], 0.0),
                torch.full_like(token, source),
                token,
            )
        )
    columns = list(zip(*parts))
    # FP8 has no cat on every device; its bytes do
    x = torch.cat([p.view(torch.uint8) for p in columns[0]]).view(inputs[0].x.dtype)
    scales = None if inputs[0].scales is None else torch.cat(columns[1])
    topk_idx = torch.cat(columns[2])
    per_expert = [int((topk_idx == expert).sum()) for expert in range(local)]
    return Received(
        x, scales, topk_idx, torch.cat(columns[3]), torch.cat(columns[4]), torch.cat(columns[5]),
        per_expert,
    )  # fmt: skip


def expert_output(x, topk_idx, topk_weights, rank):
    """Stand-in for a rank's experts: bfloat16 [rows, hidden], another function on each rank.

    x: [rows, hidden] bfloat16; topk_idx, topk_weights: as received. Rows depend on weight, expert
    and rank, so a row from the wrong rank, expert or token is seen in the sum.
    """
    factor = torch.zeros(x.size(0), device=x.device)
    for column in range(topk_idx.size(1)):
        valid = topk_idx[:, column] >= 0
        expert = topk_idx[:, column].clamp(min=0).float()
        # Powers of two and small integers: the same float32 whatever the order of the operations
        share = topk_weights[:, column] * (1.0 + expert * 0.25 + rank * 0.5)
        factor = factor + torch.where(valid, share, torch.zeros_like(share))
    return (x.float() * factor.unsqueeze(1)).to(torch.bfloat16)


def combined(case, inputs, outputs_of, rank):
    """(sum, magnitude) in float64, [tokens, hidden], of what combine returns to a rank.

    outputs_of: function (rank) -> (Received, bfloat16 rows that rank sends back). sum: of the
    rows of its tokens and its biases; magnitude: of their absolute values.
    """
    mine = inputs[rank]
    tokens = mine.x.size(0)
    total = torch.zeros(tokens, case.hidden, dtype=torch.float64, device=mine.x.device)
    magnitude = torch.zeros_like(total)
    for other in range(len(inputs)):
        got, rows = outputs_of(other)
        from_me = got.source == rank
        values = rows[from_me].double()
        total.index_add_(0, got.token[from_me], values)
        magnitude.index_add_(0, got.token[from_me], values.abs())
    for bias in mine.biases:
        total += bias.double()
        magnitude += bias.double().abs()
    return total, magnitude


def combine_bound(total, magnitude, terms, roundings=1):
    """Largest error of an element of combine: [tokens, hidden] float64.

    total, magnitude: from combined(); terms: how many numbers were added, at most.
    Summing n numbers in float32, in any order, is off by at most (n - 1) u sum|x|, with
    u = 2^-24; each rounding to bfloat16 by at most 2^-8 of what it rounds (sums of parts, if there
    are several). Higher orders are covered by one more term.
    """
    summed = terms * U_F32 * magnitude
    rounded = U_BF16 * (total.abs() if roundings == 1 else total.abs() + magnitude)
    return (summed + rounded) * (1 + U_BF16) + TINY

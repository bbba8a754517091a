"""Every rank's inputs, made from a case's seed.

A rank can make the inputs of every other rank, so the reference needs no communication.
"""

import dataclasses
from typing import Optional

import torch

#: Bytes that outputs and buffers hold before a call: bfloat16 and float32 3.4e38, FP8 E4M3 NaN,
#: and an int that is no index, so that an element nobody wrote is seen
POISON = 0x7F

#: Elements of one FP8 scale
FP8_BLOCK = 128
#: Largest finite value of FP8 E4M3
FP8_MAX = 448.0


@dataclasses.dataclass
class Inputs:
    """A rank's inputs.

    x: [tokens, hidden] bfloat16, or float8_e4m3fn with scales [tokens, hidden / 128] float32.
    topk_idx: [tokens, topk] int64, -1 for no expert. topk_weights: the same, float32.
    biases: up to two, [tokens, hidden] bfloat16, added by combine.
    """

    x: torch.Tensor
    scales: Optional[torch.Tensor]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    biases: tuple


def make_inputs(case, rank, ranks, device):
    """Inputs of a rank of a case, the same wherever they are made (on one kind of device)."""
    generator = torch.Generator(device=device)
    generator.manual_seed(case.seed * 1000003 + rank)
    tokens, experts = case.num_tokens(rank, ranks), case.num_experts(ranks)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    x, scales = normal(tokens, case.hidden).to(torch.bfloat16), None
    if case.dtype == "fp8":
        x, scales = to_fp8(x)
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    if case.routing == "empty":
        scores[:, 1::2] = -1
        scores[:, experts - case.local_experts :] = -1
    elif case.routing == "skewed":
        scores[:, 0] = 2
    topk_idx = torch.topk(scores, case.topk, dim=1, sorted=False).indices
    if case.routing == "masked":
        masked = torch.rand(tokens, case.topk, generator=generator, device=device) < 0.3
        masked[::7] = True
        topk_idx = topk_idx.masked_fill(masked, -1)
    weights = torch.rand(tokens, case.topk, generator=generator, device=device) + 0.125
    biases = tuple(normal(tokens, case.hidden).to(torch.bfloat16) for _ in range(case.biases))
    return Inputs(x, scales, topk_idx, weights, biases)


def to_fp8(x):
    """(x as float8_e4m3fn, scales) of [tokens, hidden] values; scales: [tokens, hidden / 128]."""
    blocks = x.float().view(x.size(0), x.size(1) // FP8_BLOCK, FP8_BLOCK)
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / FP8_MAX
    quantized = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return quantized.view(x.shape), scales


def from_fp8(x, scales):
    """bfloat16 values of to_fp8()'s; x: [tokens, hidden], scales: [tokens, hidden / 128]."""
    blocks = x.float().view(
        x.size(0), x.size(1) // FP8_BLOCK, FP8_BLOCK
    ) * scales.float().unsqueeze(2)
    return blocks.view(x.shape).to(torch.bfloat16)

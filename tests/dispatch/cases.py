"""What is dispatched: the cases of a run, and every rank's inputs, made from a seed.

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


@dataclasses.dataclass(frozen=True)
class Case:
    """One dispatch and its combine.

    tokens: of each rank ("uneven": a different number on each, down to 1; "one_rank_empty": the
    last rank has none). routing: "random", "skewed" (all to one expert), "empty" (every second
    expert and the whole last rank get nothing), "masked" (entries are -1, some tokens wholly).
    mode: "plain", "cached" (a second dispatch by the handle of the first), "async" (events and the
    communication stream), "worst" (num_worst_tokens, no CPU synchronisation).
    small_chunks: NVLink buffers of 32 tokens a channel, which wrap often.
    """

    name: str
    dtype: str = "bf16"
    hidden: int = 7168
    tokens: int = 128
    spread: str = "even"
    topk: int = 8
    weights: bool = True
    routing: str = "random"
    mode: str = "plain"
    alignment: int = 1
    biases: int = 0
    small_chunks: bool = False
    local_experts: int = 8
    seed: int = 1

    def num_tokens(self, rank, ranks):
        """Tokens of a rank."""
        if self.spread == "uneven":
            return max(1, self.tokens * rank // max(1, ranks - 1))
        if self.spread == "one_rank_empty" and rank == ranks - 1:
            return 0
        return self.tokens

    def num_experts(self, ranks):
        return self.local_experts * ranks


#: Intranode kernels, most general first; those that a kernel could hang on last
INTRANODE = (
    Case("bf16"),
    Case("bf16, no top-k, cached handle", hidden=2048, topk=4, weights=False, mode="cached"),
    Case("fp8", dtype="fp8"),
    Case("fp8, no top-k, cached handle", dtype="fp8", hidden=2048, weights=False, mode="cached"),
    Case("uneven tokens", spread="uneven", hidden=4096, seed=2),
    Case("fp8, uneven tokens", dtype="fp8", spread="uneven", hidden=4096, seed=3),
    Case("empty experts and an empty rank", routing="empty", hidden=2048, topk=4),
    Case("entries -1", routing="masked", hidden=2048, seed=4),
    Case("fp8, entries -1", dtype="fp8", routing="masked", hidden=2048, seed=5),
    Case("all to one expert", routing="skewed", topk=1, hidden=2048),
    Case("top-1", topk=1, hidden=512, seed=6),
    Case("one token", tokens=1, topk=2),
    Case("async", mode="async", seed=7),
    Case("fp8, async", dtype="fp8", mode="async", seed=8),
    Case("worst-case buffers", mode="worst", hidden=2048, topk=4, seed=9),
    Case("experts aligned to 128", alignment=128, hidden=2048, seed=10),
    Case("one bias", biases=1, hidden=2048, seed=11),
    Case("two biases", biases=2, hidden=2048, seed=12),
    Case("buffers that wrap", tokens=1024, hidden=2048, small_chunks=True, seed=13),
    Case("many tokens", tokens=2048, hidden=2048, seed=14),
    Case("a rank without tokens", spread="one_rank_empty", hidden=2048, topk=4, seed=15),
)

#: HybridEP compiles its kernels anew for each shape, so there are few; its ranks have equal tokens
HYBRID_EP = (
    Case("bf16", hidden=2048, tokens=256),
    Case("entries -1", hidden=2048, tokens=256, routing="masked", seed=2),
    Case("all to one expert", hidden=2048, tokens=256, topk=1, routing="skewed", seed=3),
    Case("one token", hidden=2048, tokens=1, topk=2, seed=4),
    Case("permuted by expert", hidden=2048, tokens=256, mode="permuted", alignment=32, seed=5),
    Case("fp8", dtype="fp8", hidden=2048, tokens=256, seed=6),
)


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

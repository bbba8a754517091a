"""What is dispatched: the cases of each family of kernels, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One dispatch and its combine.

    tokens: of each rank; spread: "uneven" (another number on each, down to 1), "one_rank_empty"
    (the last has none), "fewest" (16, to which HybridEP aligns; it faults with 1).
    routing: "random", "skewed" (all to one expert), "empty" (every second expert and the whole
    last rank get nothing), "masked" (entries are -1, some tokens wholly).
    mode: "plain", "cached" (a second dispatch by the handle of the first), "async" (events and the
    communication stream), "worst" (num_worst_tokens, no CPU synchronisation); of HybridEP
    "permuted" (rows by expert), "fused" (the same in one kernel); of low latency "hook".
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
        if self.spread == "fewest":
            return 16
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
    Case("fewest tokens", hidden=2048, spread="fewest", topk=2, seed=4),
    Case("by handle", hidden=2048, tokens=256, mode="cached", seed=5),
    Case("no weights", hidden=2048, tokens=256, weights=False, seed=6),
    Case("fp8", dtype="fp8", hidden=2048, tokens=256, seed=7),
    Case("permuted by expert", hidden=2048, tokens=256, mode="permuted", alignment=32, seed=8),
    Case("permuted by expert, fused", hidden=2048, tokens=256, mode="fused", alignment=32, seed=9),
)

#: What HybridEP refuses, run only by name
HYBRID_EP_REFUSED = (Case("refused: one token", hidden=2048, tokens=1, topk=2),)

#: Low-latency kernels, whose buffer has room for 128 tokens of a rank
LOW_LATENCY = (
    Case("bf16", seed=1),
    Case("fp8", dtype="fp8", seed=2),
    Case("bf16, entries -1", routing="masked", hidden=2048, seed=3),
    Case("fp8, empty experts", dtype="fp8", routing="empty", hidden=2048, topk=4, seed=4),
    Case("uneven tokens", spread="uneven", hidden=2048, seed=5),
    Case("fp8, hook", dtype="fp8", mode="hook", seed=6),
    Case("bf16, hook", mode="hook", hidden=2048, seed=7),
    Case("async", mode="async", hidden=2048, seed=8),
)

#: Names of --kernels
FAMILIES = {"intranode": INTRANODE, "hybrid-ep": HYBRID_EP, "low-latency": LOW_LATENCY}


def by_name(family, names):
    """Cases of a family with one of these names, all but the refused ones for no names."""
    named = FAMILIES[family] + (HYBRID_EP_REFUSED if family == "hybrid-ep" else ())
    return [case for case in named if case.name in names] if names else list(FAMILIES[family])

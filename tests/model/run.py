"""Runs the cases of tests/dispatch on the model: python run.py FAMILY RANKS DEFECT [CASE ...]

Prints, as JSON, {case: [for each rank, the names of the comparisons that do not hold]}. With the
Python of a PyTorch; no GPU.
"""

import dataclasses
import json
import sys
import threading
import types
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(TESTS))
import deep_ep  # noqa: E402 - the model, beside this file
from dispatch import cases  # noqa: E402
from dispatch.kernels import hybrid_ep, intranode, low_latency  # noqa: E402

FAMILIES = {"intranode": intranode, "hybrid-ep": hybrid_ep, "low-latency": low_latency}

#: So that token-by-token Python takes seconds: at most as much of a case
TOKENS, HIDDEN = 48, 512


@dataclasses.dataclass
class Job:
    """A rank that is a thread, without a GPU."""

    rank: int
    world: deep_ep.World
    device: torch.device = torch.device("cpu")
    mps: bool = False

    @property
    def ranks(self):
        return self.world.ranks

    ranks_on_gpu = ranks
    shares_gpu = True

    @property
    def group(self):
        return types.SimpleNamespace(world=self.world, rank=self.rank)

    def barrier(self):
        self.world.barrier()


def small(case):
    hidden = min(case.hidden, HIDDEN)
    return dataclasses.replace(case, tokens=min(case.tokens, TOKENS), hidden=hidden)


def main(family, ranks, defect, *names):
    torch.set_num_threads(1)
    deep_ep.DEFECT = defect
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        multi_processor_count=132
    )
    module, world = FAMILIES[family], deep_ep.World(int(ranks))
    chosen = [small(case) for case in cases.by_name(family, names)]
    jobs = [Job(rank, world) for rank in range(world.ranks)]
    found = {case.name: [None] * world.ranks for case in chosen}
    errors = []

    def work(job):
        try:
            kernels = module.Kernels(job)
            for case in chosen:
                checks = kernels.run(case)
                bad = [result["name"] for result in checks.results if not result["ok"]]
                found[case.name][job.rank] = bad if checks.results else ["nothing compared"]
        except BaseException as error:
            errors.append(error)
            world._barrier.abort()

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    print(json.dumps(found))


main(*sys.argv[1:])

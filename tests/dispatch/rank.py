"""One rank of a job: runs the cases of a family of kernels and writes what it sees, line by line.

Started by launcher.py as `python tests/dispatch rank FOLDER RANK`; FOLDER holds job.json.
"""

import dataclasses
import datetime
import faulthandler
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

from . import cases

#: Exit codes of a rank beside 0: an element was wrong; the library, driver or kernels failed
WRONG, FAILED = 1, 3


@dataclasses.dataclass
class Job:
    """What a rank knows: rank, ranks; device: torch.device; group: gloo process group;
    shares_gpu: whether ranks share GPUs, ranks_on_gpu: how many at most; mps: at the same time."""

    rank: int
    ranks: int
    device: object
    group: object
    ranks_on_gpu: int
    mps: bool

    @property
    def shares_gpu(self):
        return self.ranks_on_gpu > 1

    def barrier(self):
        """Waits until the GPU work of every rank is done."""
        import torch

        torch.cuda.synchronize()
        torch.distributed.barrier(self.group)


class Log:
    """Events as lines of JSON: a killed rank leaves all of them but the one it was writing."""

    def __init__(self, path, seconds):
        self._file = open(path, "w", encoding="utf-8")
        # A rank that hangs says where, shortly before the launcher kills it
        self._silence = max(0.5, seconds - 3)

    def write(self, event, **fields):
        self._file.write(json.dumps(dict(fields, event=event)) + "\n")
        self._file.flush()
        faulthandler.dump_traceback_later(self._silence)


def main(arguments):
    """Runs a rank. Returns its exit code."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    faulthandler.enable()
    log = Log(folder / "rank-{}.jsonl".format(rank), job["seconds"])
    try:
        log.write("start", pid=os.getpid())
        return _run(job, folder, rank, log)
    except BaseException as error:
        traceback.print_exc()
        log.write("error", text="{}: {}".format(type(error).__name__, error))
        sys.stderr.flush()
        # Another rank may wait in a kernel: no clean-up that waits for the GPU
        os._exit(FAILED)


def _run(job, folder, rank, log):
    import torch

    device = torch.device("cuda", rank % job["gpus"])
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=job["ranks"],
        timeout=datetime.timedelta(seconds=job["seconds"]),
    )
    context = Job(
        rank, job["ranks"], device, torch.distributed.group.WORLD,
        -(-job["ranks"] // job["gpus"]), job["mps"],
    )  # fmt: skip
    module = job["kernels"].replace("-", "_")
    family = importlib.import_module("." + module, __package__ + ".kernels")
    kernels = family.Kernels(context)
    log.write("ready", torch=torch.__version__, gpu=torch.cuda.get_device_name(device))
    chosen = cases.by_name(job["kernels"], job["cases"])
    good = True
    for repeat in range(job["repeats"]):
        for case in chosen:
            case = dataclasses.replace(case, seed=case.seed + 1000 * repeat)
            log.write("begin", case=case.name, seed=case.seed)
            begin = time.monotonic()
            checks = kernels.run(case)
            context.barrier()
            log.write(
                "case", case=case.name, seed=case.seed, ok=checks.ok, checks=checks.results,
                seconds=round(time.monotonic() - begin, 3),
            )  # fmt: skip
            good = good and checks.ok
    for tokens in job["bandwidth"]:
        log.write("begin", case="bandwidth, {} tokens".format(tokens))
        log.write("bandwidth", tokens=tokens, **_bandwidth(context, kernels, tokens, job))
    kernels.close()
    log.write("done")
    torch.distributed.destroy_process_group()
    return 0 if good else WRONG


def _bandwidth(context, kernels, tokens, job):
    """Medians of a dispatch and a combine: milliseconds, and bytes that this rank received."""
    dispatch, combine, size = kernels.bandwidth(tokens, job["hidden"], job["topk"])
    found = {"bytes": size}
    for name, function in (("dispatch", dispatch), ("combine", combine)):
        times = sorted(_timed(context, function, job["iterations"]))
        found[name + "_ms"] = statistics.median(times)
        found[name + "_ms_quartiles"] = [times[len(times) // 4], times[3 * len(times) // 4]]
    copy = _copies(context, size, job["iterations"])
    found["copy_ms"] = statistics.median(copy)
    return found


def _timed(context, function, iterations, warm=3):
    """Milliseconds of each call on the GPU, by CUDA events; every rank starts together."""
    import torch

    times = []
    for number in range(warm + iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        context.barrier()
        begin.record()
        function()
        end.record()
        end.synchronize()
        if number >= warm:
            times.append(begin.elapsed_time(end))
    return times


def _copies(context, size, iterations):
    """Milliseconds of copies of as many bytes on the device, while the other ranks wait."""
    import torch

    times = []
    for rank in range(context.ranks):
        context.barrier()
        if rank == context.rank:
            source = torch.empty(max(size, 16), dtype=torch.uint8, device=context.device)
            target = torch.empty_like(source)
            for number in range(iterations + 3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(source)
                end.record()
                end.synchronize()
                if number >= 3:
                    times.append(begin.elapsed_time(end))
    context.barrier()
    return times

"""Starts the ranks of a job on this node, and never waits longer than its deadline for a sign.

A sign is a line that a rank writes: it starts, is ready, begins a case or ends it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .errors import UsageError

#: Seconds that the other ranks get to end by themselves once one has failed
GRACE = 10
#: DeepEP's own time-out, in seconds; a deadline has to be below it, or its message says nothing
DEEPEP_TIMEOUT = 100
#: Lines of a rank's output that a report shows
LAST_LINES = 12


@dataclasses.dataclass
class RankOutcome:
    """How a rank ended. code: exit code (negative: signal), None if it was killed by the launcher;
    events: what it wrote; lines: the last lines of its output; output: all of it."""

    rank: int
    code: object
    events: list
    output: str

    @property
    def lines(self):
        return [line for line in self.output.splitlines() if line.strip()][-LAST_LINES:]

    @property
    def last_case(self):
        """Case that was begun and not ended, else None."""
        begun = None
        for event in self.events:
            if event["event"] == "begin":
                begun = event["case"]
            elif event["event"] in ("case", "bandwidth", "done"):
                begun = None
        return begun

    @property
    def said(self):
        """The line that says most: what ended the rank, else the last it printed, else ""."""
        errors = [event["text"] for event in self.events if event["event"] == "error"]
        lines = (errors or self.lines or [""])[-1].strip().splitlines()
        return lines[0] if lines else ""


@dataclasses.dataclass
class Outcome:
    """How a job ended. ranks: RankOutcome of each; hung: the deadline ended it; seconds: wall."""

    job: dict
    ranks: list
    hung: bool
    seconds: float

    @property
    def finished(self):
        """Every rank came to its end."""
        return not self.hung and all(
            any(event["event"] == "done" for event in rank.events) for rank in self.ranks
        )


def make_job(kernels, ranks, gpus, seconds, **more):
    """The document that ranks read (job.json). seconds: the deadline, without a sign of any rank
    (HybridEP may compile for minutes, but no case of it does). Raises UsageError."""
    if not 1 <= seconds < DEEPEP_TIMEOUT:
        raise UsageError(
            "a deadline of {} s: it has to lie between 1 and {} s, below DeepEP's own time-out, "
            "so that a hang is reported before DeepEP ends in its own way".format(
                seconds, DEEPEP_TIMEOUT - 1
            )
        )
    job = dict(
        kernels=kernels, ranks=ranks, gpus=gpus, seconds=seconds, cases=[], repeats=1, mps=False,
        bandwidth=[], hidden=7168, topk=8, iterations=20,
    )  # fmt: skip
    unknown = set(more) - set(job)
    if unknown:
        raise ValueError("a job has no {}".format(", ".join(sorted(unknown))))
    return dict(job, **more)


def environment(base=None):
    """Environment of ranks of one node: gloo by the loopback, NVLink multicast off."""
    values = dict(os.environ if base is None else base)
    values.update(
        GLOO_SOCKET_IFNAME="lo",
        PYTHONUNBUFFERED="1",
        NCCL_NVLS_ENABLE="0",
        TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
        NVSHMEM_DISABLE_NVLS="1",
    )
    # torchrun's or srun's of an outer job are not this job's
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        values.pop(name, None)
    return values


def run(job, folder, python=sys.executable, env=None):
    """Runs a job's ranks. Logs stay in folder, one of each rank. Returns the Outcome."""
    # Ranks meet by a file's address, which has to be absolute
    folder = Path(folder).resolve()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError("{} exists: name a folder that does not".format(folder)) from None
    except OSError as error:
        raise UsageError("cannot make {}: {}".format(folder, error.strerror)) from None
    (folder / "job.json").write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    begin = time.monotonic()
    processes = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _kill(processes))
        for rank in range(job["ranks"]):
            log = stack.enter_context(open(folder / "rank-{}.log".format(rank), "wb"))
            command = [str(python), str(Path(__file__).resolve().parent), "rank"]
            processes.append(
                subprocess.Popen(
                    command + [str(folder), str(rank)],
                    env=environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        hung = not _wait(processes, folder, job["seconds"])
        codes = [process.poll() for process in processes]
    ranks = [read_rank(folder, rank, code) for rank, code in enumerate(codes)]
    return Outcome(job, ranks, hung, round(time.monotonic() - begin, 1))


def _wait(processes, folder, seconds):
    """True if all ended, or one failed and the others had GRACE; False after seconds without a
    sign."""
    signs, deadline = -1, 0.0
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True
        now = time.monotonic()
        seen = sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))
        if seen != signs:
            signs, deadline = seen, now + seconds
        elif now >= deadline:
            return False
        # A wrong element (1) stops nobody: that rank has come to its end
        if any(code not in (None, 0, 1) for code in codes):
            while time.monotonic() < now + GRACE:
                if None not in [process.poll() for process in processes]:
                    break
                time.sleep(0.1)
            return True
        time.sleep(0.05)


def _kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def read_rank(folder, rank, code):
    """RankOutcome of a rank from what it left in the job's folder."""
    events = []
    path = folder / "rank-{}.jsonl".format(rank)
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                # The last line of a killed rank may be cut off
                events.append(json.loads(line))
    output = (folder / "rank-{}.log".format(rank)).read_text(encoding="utf-8", errors="replace")
    return RankOutcome(rank, code, events, output)

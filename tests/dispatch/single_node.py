"""single-node: real dispatch and combine on this node's GPUs, every element checked.

Ranks get a GPU each; where there are more ranks than GPUs they share them, by turns.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from . import cases, causes, launcher, plot
from .diagnosis import child, machine
from .errors import UsageError
from .report import Report

#: Ranks that DeepEP's intranode kernels are compiled for
RANKS = (2, 4, 8)

#: Seconds without a sign of any rank; DeepEP's own time-out is 100
DEADLINE = 95


def _list_of(kind):
    def parse(text):
        try:
            return [kind(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError("not a list: {!r}".format(text)) from None

    return parse


def add_arguments(parser):
    parser.add_argument(
        "--ranks", type=_list_of(int), metavar="N,...",
        help="jobs of so many ranks (default: 2, 4 and 8 that fit on the GPUs, or share one)",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", type=_list_of(str), default=list(cases.FAMILIES), metavar="NAME,...",
        help="of {} (default: all)".format(", ".join(cases.FAMILIES)),
    )  # fmt: skip
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="only these cases"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="rounds of all cases, with other seeds each"
    )
    parser.add_argument(
        "--seconds",
        type=int,
        default=DEADLINE,
        help="a job may show no sign for so long (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=_list_of(int), default=[], metavar="N,...",
        help="measure GB/s for so many tokens a rank, by 7168, top-8, BF16",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw GB/s over tokens")
    parser.add_argument(
        "--mps", action="store_true", help="ranks on one GPU run at once (CUDA MPS)"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep each rank's log here")
    parser.add_argument(
        "--python", default=sys.executable, help="Python that has DeepEP (default: this one)"
    )


def run(options):
    """Runs the jobs one after another. Returns the Report; raises UsageError."""
    unknown = [name for name in options.kernels if name not in cases.FAMILIES]
    if unknown or not options.kernels:
        raise UsageError(
            "no kernels {}: choose of {}".format(", ".join(unknown), ", ".join(cases.FAMILIES))
        )
    wrong = [number for number in options.ranks or () if number not in RANKS]
    if wrong:
        raise UsageError(
            "--ranks {}: DeepEP's kernels within a node are compiled for {} ranks".format(
                wrong[0], ", ".join(map(str, RANKS))
            )
        )
    if options.repeats < 1:
        raise UsageError("--repeats {}: at least 1".format(options.repeats))
    known = {c.name for name in options.kernels for c in cases.by_name(name, options.case)}
    missing = sorted(set(options.case) - known)
    if missing:
        names = [c.name for name in options.kernels for c in cases.FAMILIES[name]]
        raise UsageError("no case {}: choose of {}".format(missing[0], "; ".join(names)))
    if options.plot and not options.tokens:
        raise UsageError("--plot draws what --tokens measures: give both")
    if options.plot:
        # Before minutes of measuring
        plot.library()
    gpus = find_gpus()
    report = Report("single-node", facts={"gpus": gpus, "jobs": []})
    folder = options.logs or Path(tempfile.mkdtemp(prefix="dispatch-"))
    if options.logs:
        _make(folder)
    ranks = options.ranks or default_ranks(len(gpus))
    with mps(options.mps, folder):
        for name in options.kernels:
            if not cases.by_name(name, options.case):
                continue
            reason = low_latency_missing() if name == "low-latency" else ""
            if reason:
                report.add(name, "skip", reason, reference="deepseek-ai/DeepEP#695")
                continue
            for number in ranks:
                _job(report, options, name, number, gpus, folder)
    if options.plot:
        plot.draw(report.facts["jobs"], options.plot, gpus[0]["name"])
        report.notes.append("plot: {}".format(options.plot))
    if options.tokens and any(number > len(gpus) for number in ranks):
        report.notes.append(
            "GB/s of ranks that share a GPU are those of taking turns on it, not of NVLink."
        )
    if report.exit_code == 0 and not options.logs:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        report.notes.append("each rank's output: {}".format(folder))
    return report


def find_gpus():
    """GPUs that this process sees, as diagnosis/probe.py tells them. Raises UsageError."""
    found = child.probe("gpu", deadline=30)
    if found["state"] != "ok":
        raise UsageError("the driver does not answer ({state}): run `doctor`".format(**found))
    if not found["gpus"]:
        raise UsageError(
            "no GPU here ({}): single-node needs one; `doctor` says what is missing".format(
                found["error"] or "the driver shows none"
            )
        )
    return found["gpus"]


def default_ranks(gpus):
    """2, 4, 8 as far as there are GPUs; all three where ranks have to share one."""
    return [n for n in RANKS if n <= gpus] or list(RANKS)


def low_latency_missing():
    """Why low-latency kernels cannot run on this node, "" if they can."""
    facts = {"machine": child.probe("machine", deadline=20)}
    if machine.usable(facts):
        return ""
    hcas = facts["machine"].get("hcas", [])
    seen = ", ".join(hca["name"] for hca in hcas) or "none"
    return (
        "not run: no active mlx5 HCA on this node (seen: {}). Without IBGDA, NVSHMEM 3.6 leaves "
        "no RC queue pairs and these kernels stop at an assertion".format(seen)
    )


def _make(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("cannot make {}: {}".format(folder, error.strerror)) from None


def _job(report, options, name, ranks, gpus, folder):
    job = launcher.make_job(
        name, ranks, len(gpus), options.seconds, cases=options.case,
        repeats=options.repeats, mps=options.mps, bandwidth=options.tokens,
    )  # fmt: skip
    env = dict(os.environ)
    if name == "hybrid-ep":
        # Its kernels, compiled by each rank, are of no use afterwards
        env["HYBRID_EP_CACHE_DIR"] = str(folder / "hybrid-ep-cache")
        env.setdefault("USE_MNNVL", "0")
    place = folder / "{}-{}-ranks".format(name, ranks)
    outcome = launcher.run(job, place, python=options.python, env=env)
    shutil.rmtree(folder / "hybrid-ep-cache", ignore_errors=True)
    judge(report, name, outcome, gpus)


def judge(report, name, outcome, gpus):
    """Adds the row of a job, and its figures to the report's facts."""
    job = outcome.job
    ranks, check = job["ranks"], "{}, {} ranks".format(name, job["ranks"])
    where = placement(ranks, gpus, job["mps"])
    made = summary(outcome)
    figures = bandwidth(outcome)
    report.facts["jobs"].append(
        {
            "kernels": name, "ranks": ranks, "placement": where, "seconds": outcome.seconds,
            "cases": made, "bandwidth": figures, "codes": [rank.code for rank in outcome.ranks],
        }
    )  # fmt: skip
    wrong = [case for case in made if not case["ok"]]
    if not outcome.finished:
        _add_failure(report, check, outcome, where)
    elif wrong or not made:
        first = wrong[0] if wrong else {"case": "none ran", "text": "no case of that name"}
        report.add(
            check, "fail", "{} of {} cases wrong ({}), first: {}: {}".format(
                len(wrong), len(made), where, first["case"], first["text"]
            ),
            why="what arrives is not what was sent",
            action="`doctor`; then report the case, its seed and this line",
        )  # fmt: skip
    else:
        elements = sum(case["elements"] for case in made)
        worst = max(case["worst"] for case in made)
        report.add(
            check, "pass",
            "{} cases, {:.1f} million elements right (combine at most {:.2f} of its bound), {}; "
            "{} s".format(len(made), elements / 1e6, worst, where, outcome.seconds),
        )  # fmt: skip
    for row in figures:
        report.add(
            "{}, {} tokens".format(check, row["tokens"]), "info",
            "dispatch {dispatch_gbs:.1f} GB/s, combine {combine_gbs:.1f} GB/s (a copy on the "
            "device: {copy_gbs:.0f})".format(**row), data=row,
        )  # fmt: skip


def _add_failure(report, check, outcome, where):
    hanging = [rank for rank in outcome.ranks if rank.code is None] if outcome.hung else []
    if outcome.hung:
        case = next((rank.last_case for rank in hanging if rank.last_case), None)
        found = "hung: killed after {} s without a sign, {} ({})".format(
            outcome.job["seconds"],
            "in case {!r}".format(case) if case else "before the first case", where,
        )  # fmt: skip
    else:
        codes = ", ".join("rank {}: {}".format(r.rank, r.code) for r in outcome.ranks if r.code)
        case = next((rank.last_case for rank in outcome.ranks if rank.last_case), None)
        found = "ended early ({}){} ({})".format(
            codes or "no exit code", ", in case {!r}".format(case) if case else "", where
        )
    cause, evidence = causes.of_outcome(outcome)
    last = ["rank {}: {}".format(r.rank, r.said) for r in outcome.ranks if r.said]
    report.add(
        check, "fail", found,
        evidence=evidence or "; ".join(last[:8]) or "no rank printed anything",
        why=cause["cause"] if cause else "none of the known causes fits what the ranks printed",
        reference=cause["reference"] if cause else "",
        action=cause["action"] if cause else "read the ranks' logs; `doctor` shows what is loaded",
        data={"last_lines": {str(rank.rank): rank.lines for rank in outcome.ranks}},
    )  # fmt: skip


def placement(ranks, gpus, at_once):
    """Where ranks run, in words."""
    names = sorted({gpu["name"] for gpu in gpus})
    if ranks <= len(gpus):
        return "a GPU each, {}".format(" and ".join(names))
    way = "at once by MPS" if at_once else "by turns"
    if len(gpus) == 1:
        return "all sharing one {}, {}".format(names[0], way)
    return "sharing {} GPUs, {}".format(len(gpus), way)


def summary(outcome):
    """Cases over all ranks: dicts with case, seed, ok, elements, worst (largest error as a share
    of its bound), seconds, text (the first thing wrong)."""
    found = {}
    for rank in outcome.ranks:
        for event in rank.events:
            if event["event"] != "case":
                continue
            case = found.setdefault(
                (event["case"], event["seed"]),
                dict(case=event["case"], seed=event["seed"], ok=True, elements=0, worst=0.0,
                     seconds=0.0, text="", ranks=0),
            )  # fmt: skip
            case["ranks"] += 1
            case["ok"] = case["ok"] and event["ok"]
            case["seconds"] = max(case["seconds"], event["seconds"])
            for check in event["checks"]:
                case["elements"] += check["elements"]
                case["worst"] = max(case["worst"], check.get("worst", 0.0))
                if not check["ok"] and not case["text"]:
                    case["text"] = "rank {}, {}: {}".format(
                        rank.rank, check["name"], check["text"]
                    )
    for case in found.values():
        if case["ranks"] < len(outcome.ranks):
            case["ok"] = False
            case["text"] = case["text"] or "only {} ranks came to its end".format(case["ranks"])
    return list(found.values())


def bandwidth(outcome):
    """For each token count: medians over ranks of milliseconds, and GB/s (10^9 bytes received a
    rank and second; a copy counts its bytes once)."""
    by_tokens = {}
    for rank in outcome.ranks:
        for event in rank.events:
            if event["event"] == "bandwidth":
                by_tokens.setdefault(event["tokens"], []).append(event)
    rows = []
    for tokens, events in sorted(by_tokens.items()):
        row = {"tokens": tokens, "bytes": statistics.median(e["bytes"] for e in events)}
        for name in ("dispatch", "combine", "copy"):
            # The slowest rank's median: a collective is as fast as that
            milliseconds = max(event[name + "_ms"] for event in events)
            row[name + "_ms"] = milliseconds
            row[name + "_gbs"] = row["bytes"] / milliseconds / 1e6 if milliseconds else 0.0
        rows.append(row)
    return rows


@contextlib.contextmanager
def mps(wanted, folder):
    """CUDA's multi-process service for the jobs inside, with folders of its own; nothing if it is
    not wanted. Raises UsageError."""
    if not wanted:
        yield
        return
    folders = {"CUDA_MPS_PIPE_DIRECTORY": "mps", "CUDA_MPS_LOG_DIRECTORY": "mps-log"}
    saved = {variable: os.environ.get(variable) for variable in folders}
    try:
        for variable, name in folders.items():
            _make(folder / name)
            os.environ[variable] = str((folder / name).resolve())
        answer = child.run(["nvidia-cuda-mps-control", "-d"], 20)
        if answer["state"] != "ok":
            raise UsageError(
                "MPS does not start ({}): leave --mps out".format(
                    answer.get("error") or answer["state"]
                )
            )
        try:
            yield
        finally:
            child.run(["sh", "-c", "echo quit | nvidia-cuda-mps-control"], 20)
    finally:
        for variable, value in saved.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value

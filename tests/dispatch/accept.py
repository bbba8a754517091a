"""accept: does a finished run of Automodel's benchmark meet the report's acceptance criteria?

The report is NVIDIA-NeMo/Automodel#3967. Its benchmark (nemo_automodel.recipes.llm.benchmark)
writes one JSON object (--benchmark.json_output_path); its rank 0 logs `Rank 0 | Iteration N` when
an iteration begins, and the same with its loss when it ends. Logs are read line by line.
"""

import glob
import json
import math
import re
from pathlib import Path

from .errors import UsageError
from .report import Report

#: What must not stand in any log: check -> (pattern, why, reference)
FORBIDDEN = {
    "no DeepEP error": (
        r"DeepEP (error|timeout)|timeout \(dispatch CPU\)|(dispatch|combine) timeout",
        "a dispatch waited for tokens that did not come. Do not raise the time-out: what is lost "
        "does not arrive later",
        "DeepEP#564, Automodel#3967",
    ),
    "no counter stuck at -1": (
        r"\b(num_(rdma_)?recv_tokens|moe_recv_\w*counter(\[\d+\])?)\s*[:=]\s*-1\b",
        "a receive counter never got its value: no rank's counts arrived",
        "Automodel#3967",
    ),
    "no illegal access": (
        r"illegal memory access|cudaErrorIllegalAddress|CUDA error: 700\b",
        "a kernel left its memory, also if only at teardown; #564 without its bound does that",
        "DeepEP#696",
    ),
}

ITERATION = re.compile(r"Rank 0 \| Iteration (\d+)(?: \|.*?\bloss=(\S+))?")

#: Numbers of the summary, all at least this
LEAST = {"total_steps": 1, "warmup_steps": 0, "training_steps": 1, "world_size": 1}
SECONDS = ("setup_time_seconds", "warmup_time_seconds", "training_time_seconds")

#: Relative difference that the average step time may have from time by steps (it is rounded)
AVERAGE = 0.01

ACTION = (
    "read that line's surroundings; `doctor` and `qp-layout` on one of the nodes name the cause"
)


def add_arguments(parser):
    add = parser.add_argument
    add(
        "--summary", type=Path, required=True, metavar="FILE", help="JSON that the benchmark wrote"
    )
    add("--logs", required=True, metavar="GLOB", help="every node's log, quoted: 'logs/*.log'")
    add("--exit-codes", type=Path, metavar="FILE", help="a line `NODE CODE` for each node")


def run(options):
    """The report. Raises UsageError where there is no log, or a file cannot be read."""
    logs = sorted(path for path in glob.glob(options.logs, recursive=True) if Path(path).is_file())
    if not logs:
        raise UsageError("--logs {}: no such file".format(options.logs))
    report = Report("accept", facts={"logs": logs})
    summary = _summary(report, options.summary)
    seen = read_logs(logs)
    _iterations(report, summary, seen)
    _exit_codes(report, options.exit_codes, summary)
    for check, (_, why, reference) in FORBIDDEN.items():
        found = seen["forbidden"][check]
        if found:
            report.add(
                check, "fail", "{} lines, first: {}".format(found["lines"], found["text"]),
                evidence=found["where"], why=why, reference=reference, action=ACTION,
            )  # fmt: skip
        else:
            report.add(check, "pass", "in {} logs, {:,} lines".format(len(logs), seen["lines"]))
    return report


def _summary(report, path):
    """The summary if it can be used, else None."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        report.add(
            "summary", "fail", "{}: {}".format(path, error.strerror),
            why="the benchmark writes it when it has come to its end",
            action="give --benchmark.json_output_path of the run, from the node of rank 0",
        )  # fmt: skip
        return None
    except ValueError as error:
        report.add("summary", "fail", "{} is no JSON: {}".format(path, error))
        return None
    wrong = _wrong(document)
    if wrong:
        report.add("summary", "fail", "; ".join(wrong), evidence=str(path))
        return None
    report.facts["summary"] = document
    report.add(
        "summary", "pass",
        "{total_steps} iterations ({warmup_steps} warm-up, {training_steps} measured), "
        "{avg_iter_time_seconds} s each, world size {world_size}".format(**document),
        evidence=str(path),
    )  # fmt: skip
    return document


def _wrong(document):
    """What is wrong with a summary, a list of sentences."""
    if not isinstance(document, dict):
        return ["the summary is no JSON object"]
    wrong = []
    for key, least in LEAST.items():
        value = document.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            wrong.append("{} is {!r}".format(key, value))
    for key in (*SECONDS, "avg_iter_time_seconds"):
        value = document.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            wrong.append("{} is {!r}".format(key, value))
    if wrong:
        return wrong
    if document["warmup_steps"] + document["training_steps"] != document["total_steps"]:
        wrong.append(
            "{warmup_steps} + {training_steps} steps are not {total_steps}".format(**document)
        )
    average = document["training_time_seconds"] / document["training_steps"]
    if abs(average - document["avg_iter_time_seconds"]) > AVERAGE * average:
        wrong.append(
            "{training_time_seconds} s for {training_steps} steps are not "
            "{avg_iter_time_seconds} s each".format(**document)
        )
    return wrong


def read_logs(paths):
    """{"ended": {iteration: loss}, "begun": set, "lines": number, "forbidden": {check: None or
    {"lines", "text", "where"} of the first}}. Raises UsageError."""
    seen = {"ended": {}, "begun": set(), "lines": 0, "forbidden": dict.fromkeys(FORBIDDEN)}
    patterns = [(check, re.compile(entry[0])) for check, entry in FORBIDDEN.items()]
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                for number, line in enumerate(stream, 1):
                    seen["lines"] += 1
                    _read_line(seen, patterns, line, "{}:{}".format(path, number))
        except OSError as error:
            raise UsageError("cannot read {}: {}".format(path, error.strerror)) from None
    return seen


def _read_line(seen, patterns, line, where):
    match = ITERATION.search(line)
    if match:
        seen["begun"].add(int(match.group(1)))
        if match.group(2):
            seen["ended"][int(match.group(1))] = match.group(2)
    for check, pattern in patterns:
        if pattern.search(line):
            first = seen["forbidden"][check]
            if first:
                first["lines"] += 1
            else:
                entry = {"lines": 1, "text": line.strip()[:200], "where": where}
                seen["forbidden"][check] = entry


def _iterations(report, summary, seen):
    ended = seen["ended"]
    bad = [n for n, loss in sorted(ended.items()) if not _finite(loss)]
    if bad:
        report.add("loss", "fail", "iteration {}: loss={}".format(bad[0], ended[bad[0]]))
    elif ended:
        last = max(ended)
        report.add("loss", "pass", "finite; {} in iteration {}".format(ended[last], last))
    if summary is None:
        report.add(
            "iterations", "fail", "{} ended; how many there should be is in the summary".format(
                len(ended)
            ),
        )  # fmt: skip
        return
    wanted = range(summary["total_steps"])
    missing = [n for n in wanted if n not in ended]
    if missing:
        stuck = sorted(seen["begun"] - set(ended))
        report.add(
            "iterations", "fail", "{} of {} ended; the first that did not is {}{}".format(
                len(wanted) - len(missing), len(wanted), missing[0],
                ", which began" if missing[0] in stuck else "",
            ),
            why="the run has to complete every configured iteration",
            action="is rank 0's log (node 0) among the logs? else see where it stopped",
        )  # fmt: skip
    else:
        report.add("iterations", "pass", "{0} of {0}".format(len(wanted)))


def _finite(text):
    try:
        return math.isfinite(float(text.rstrip(",;")))
    except ValueError:
        return False


def _exit_codes(report, path, summary):
    if path is None:
        report.add(
            "exit codes", "skip", "not checked: no --exit-codes",
            action="write a line `NODE CODE` for each node's launcher, and give that file",
        )  # fmt: skip
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError("cannot read {}: {}".format(path, error.strerror)) from None
    codes = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"(\S+)\s+(-?\d+)", line.strip())
        if not match:
            raise UsageError("{}:{}: not `NODE CODE`: {}".format(path, number, line.strip()))
        if match.group(1) in codes:
            raise UsageError("{}:{}: {} a second time".format(path, number, match.group(1)))
        codes[match.group(1)] = int(match.group(2))
    report.facts["exit_codes"] = codes
    bad = ["{}: {}".format(node, code) for node, code in codes.items() if code]
    if bad or not codes:
        report.add(
            "exit codes", "fail", "; ".join(bad) or "the file names no node",
            evidence=str(path), why="a run that tears down cleanly ends with 0 on every node",
        )  # fmt: skip
    elif summary and summary["world_size"] % len(codes):
        report.add(
            "exit codes", "fail",
            "{} nodes cannot share {} ranks evenly: a node is missing".format(
                len(codes), summary["world_size"]
            ),
            evidence=str(path),
        )  # fmt: skip
    else:
        report.add("exit codes", "pass", "0 on all {} nodes".format(len(codes)))

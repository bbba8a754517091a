"""doctor: what is installed and loaded here, and whether it can work.

Facts come from the process that imports PyTorch and DeepEP, from the installed files and from the
kernel, not from names. Nothing is written. Everything that may hang or crash (the import, the
driver, sysfs) happens in processes of their own, with deadlines.
"""

import argparse
import dataclasses
import os
from pathlib import Path

from .diagnosis import collect, verdict
from .diagnosis.rule import CAPABILITIES
from .errors import UsageError
from .report import Report

#: Seconds that importing PyTorch and DeepEP may take; a cold shared file system needs minutes
IMPORT = 180


@dataclasses.dataclass
class DoctorReport(Report):
    """A capability that cannot be told is no pass: exit code 2, unless something fails."""

    @property
    def exit_code(self):
        code = super().exit_code
        untold = any(row.result == "skip" and row.check.startswith(WORK) for row in self.rows)
        return 2 if code == 0 and untold else code


#: How the rows begin that say what can work, and those on a single file
WORK = ("can work: ", "installation: queue-pair lookup")


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError("{} is no number of seconds from 1 to 86400".format(text))
    return seconds


def add_arguments(parser):
    parser.add_argument(
        "--for",
        dest="capability",
        choices=sorted(CAPABILITIES),
        help="what it has to be good for; without it, everything that is built in: "
        + "; ".join("{}: {}".format(*item) for item in sorted(CAPABILITIES.items())),
    )
    parser.add_argument(
        "--python", metavar="EXE", help="the Python that has PyTorch and DeepEP, if not this one"
    )
    parser.add_argument(
        "--extension",
        type=Path,
        metavar="FILE.so",
        help="only this build of deep_ep_cpp (any, not loaded): links, device code, lookup",
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=IMPORT,
        metavar="SECONDS",
        help="how long importing PyTorch and DeepEP may take (default: %(default)s)",
    )


def run(options):
    """The report. Raises UsageError."""
    if options.python and not os.access(options.python, os.X_OK):
        raise UsageError("--python {}: there is no such program".format(options.python))
    report = DoctorReport("doctor")
    if options.extension:
        if not options.extension.is_file():
            raise UsageError("--extension {}: there is no such file".format(options.extension))
        report.facts = collect.of_file(options.extension, options.python)
        report.rows = verdict.of_file(report.facts)
        report.notes = ["Only this file was looked at, nothing was loaded."]
        return report
    report.facts = collect.of_process(options.python, options.deadline)
    report.rows = verdict.rows(report.facts, options.capability)
    report.notes = [_summary(report.rows)]
    return report


def _summary(rows):
    """A sentence on where what fails lies."""
    groups = ("installation", "node")
    failing = {
        group: sum(row.result == "fail" and row.check.startswith(group + ":") for row in rows)
        for group in groups
    }
    if not any(failing.values()):
        return "Neither the installation nor this node has a finding."
    if not failing["installation"]:
        return "The installation has no finding; what fails is this node."
    if not failing["node"]:
        return "This node has no finding; what fails is the installation."
    return "Findings on both: {installation} on the installation, {node} on this node.".format(
        **failing
    )

"""prove: doctor, qp-layout and single-node one after another, on one node, with one summary."""

import argparse
import sys

from . import doctor, qp_layout, single_node
from .errors import UsageError
from .report import Report, Row


def add_arguments(parser):
    """Options of qp-layout and of single-node."""
    qp_layout.add_arguments(parser)
    single_node.add_arguments(parser)


def run(options):
    """Runs and shows the three, and returns the summary; facts: the reports themselves."""
    report = Report("prove")
    options.arms = not options.prebuilt
    for name, command, arguments, chosen in (
        ("doctor", doctor, _doctor_options(options), _of_doctor),
        ("qp-layout", qp_layout, options, _totals),
        ("single-node", single_node, options, _jobs),
    ):
        print("--- {}".format(name))
        try:
            part = command.run(arguments)
        except UsageError as error:
            report.add(name, "fail", "not made: {}".format(error))
            continue
        part.show(sys.stdout)
        sys.stdout.flush()
        report.facts[name] = part.document()
        report.rows += chosen(part)
    print("--- together")
    return report


def _doctor_options(options):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    # This node alone: what only other nodes would need is told, and is no finding
    arguments = ["--for", "intranode"]
    if options.python != sys.executable:
        arguments += ["--python", options.python]
    return parser.parse_args(arguments)


def _of_doctor(part):
    work = [row for row in part.rows if row.check.startswith("can work")]
    result = {0: "pass", 1: "fail"}.get(part.exit_code, "skip")
    found = "; ".join("{}: {}".format(row.check, row.found) for row in work)
    return [_row("doctor", result, found)]


def _totals(part):
    """An arm each, without its shapes."""
    rows = [row for row in part.rows if row.check.endswith(": all") or row.result == "fail"]
    return [_row("qp-layout, {}".format(row.check), row.result, row.found) for row in rows]


def _jobs(part):
    return [_row(row.check, row.result, row.found) for row in part.rows if row.result != "info"]


def _row(check, result, found):
    return Row(check, result, found)

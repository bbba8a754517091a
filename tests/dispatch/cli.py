"""Command line of tests/dispatch."""

import argparse
import importlib
import sys
from pathlib import Path

from .errors import UsageError

#: Subcommand -> (module with add_arguments(parser) and run(options) -> Report or exit code, help)
COMMANDS = {
    "doctor": ("doctor", "what is installed and loaded here, and whether it can work"),
    "qp-layout": ("qp_layout", "DeepEP's queue-pair lookup against NVSHMEM's own, on one GPU"),
    "single-node": ("single_node", "real dispatch and combine on 1 to 8 GPUs of this node"),
    "accept": ("accept", "the report's acceptance criteria on a finished run of its benchmark"),
    "prove": ("prove", "the three of them on this node, with one summary"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError("{} (--help shows the options)".format(message))


def _parser(chosen):
    parser = _Parser(prog="dispatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name != chosen:
            # What is wrong with one command does not keep another from running
            continue
        command.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
        implementation = importlib.import_module("." + module, __package__)
        implementation.add_arguments(command)
        command.set_defaults(run=implementation.run)
    return parser


def main(arguments):
    """Runs one command. Returns its exit code: 0 works, 1 a finding, 2 usage or set-up."""
    if arguments[:1] == ["rank"]:
        # Of the launcher, not of people
        from . import rank

        return rank.main(arguments[1:])
    try:
        options = _parser(arguments[0] if arguments else None).parse_args(arguments)
        report = options.run(options)
        report.show(sys.stdout)
        if options.json:
            report.write(options.json)
        return report.exit_code
    except UsageError as error:
        print("dispatch: {}".format(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dispatch: interrupted", file=sys.stderr)
        return 130
